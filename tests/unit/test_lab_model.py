"""The rehearsal job really optimises: its gradient is the derivative of its loss, and training lowers the loss."""

import pytest

from chaosgpu.lab.model import Model


def test_gradient_is_the_derivative_of_the_loss() -> None:
    model = Model()
    for step in range(50):
        model.apply(model.gradient(0, step)[0])
    gradient, _ = model.gradient(1, 7)
    for feature in sorted(gradient)[:20]:
        nudge = 1e-5
        model.weights[feature] += nudge
        above = model.gradient(1, 7)[1]
        model.weights[feature] -= 2 * nudge
        below = model.gradient(1, 7)[1]
        model.weights[feature] += nudge
        assert (above - below) / (2 * nudge) == pytest.approx(gradient[feature], rel=1e-4, abs=1e-7)


def test_training_lowers_the_loss_on_data_not_trained_on() -> None:
    model = Model()

    def unseen() -> float:
        return sum(model.gradient(0, step)[1] for step in range(100_000, 100_200)) / 200

    before = unseen()
    for step in range(1500):
        model.apply(model.gradient(0, step)[0])
    assert before == pytest.approx(0.693, abs=0.001)
    assert unseen() < 0.62


def test_ranks_draw_different_samples() -> None:
    model = Model()
    assert model.gradient(0, 3)[0] != model.gradient(1, 3)[0]
    assert model.gradient(0, 3)[0] == model.gradient(0, 3)[0]
