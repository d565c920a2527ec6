"""Two ranks over a real connection: they agree on a state, reduce to the same bits, and find each other again."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from chaosgpu.lab.model import FEATURES, Model
from chaosgpu.lab.peer import Peer, PeerLostError

LIMIT_SECONDS = 20


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1", free.getsockname()[1]


def both(first, second):
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        return one.result(LIMIT_SECONDS), two.result(LIMIT_SECONDS)


@pytest.mark.parametrize(("steps", "leader"), [((0, 0), 0), ((40, 20), 0), ((20, 40), 1), ((40, 40), 0)])
def test_the_rank_that_is_further_hands_over_its_state(address, steps, leader) -> None:
    models = Model(), Model()
    for rank, model in enumerate(models):
        model.weights[5] = float(rank + 1)
        model.squares[6] = float(rank + 3)
    with Peer(0, address) as one, Peer(1, address) as two:
        agreed = both(lambda: one.join(steps[0], models[0]), lambda: two.join(steps[1], models[1]))
    assert agreed == (max(steps), max(steps))
    for model in models:
        assert (model.weights[5], model.squares[6]) == (leader + 1, leader + 3)


def test_both_ranks_reduce_to_the_same_mean(address) -> None:
    models = Model(), Model()
    shares = {3: 0.1, 9: 0.7}, {9: 0.2, 4: -1.0}
    with Peer(0, address) as first, Peer(1, address) as second:
        both(lambda: first.join(0, models[0]), lambda: second.join(0, models[1]))
        one, two = both(
            lambda: first.all_reduce(0, shares[0], 0.5),
            lambda: second.all_reduce(0, shares[1], 0.7),
        )
    assert one == two
    gradient, loss = one
    assert gradient == pytest.approx({3: 0.05, 4: -0.5, 9: 0.45})
    assert loss == pytest.approx(0.6)


def test_a_lost_rank_is_told_and_a_successor_is_taken_in(address) -> None:
    model = Model()
    model.weights[1] = 0.25
    with ThreadPoolExecutor(1) as pool, Peer(0, address) as survivor, Peer(1, address) as successor:
        waiting = pool.submit(survivor.join, 60, model)
        with socket.create_connection(address) as other:
            other.sendall((0).to_bytes(8, "little"))
            state_bytes = 8 + 2 * 8 * FEATURES
            assert len(other.recv(state_bytes, socket.MSG_WAITALL)) == state_bytes
            assert waiting.result(LIMIT_SECONDS) == 60
        with pytest.raises(PeerLostError):
            while True:  # a first send may still go into the buffer of the closed connection
                survivor.all_reduce(60, {1: 1.0}, 0.5)
        waiting = pool.submit(survivor.join, 60, model)
        fresh = Model()
        assert successor.join(0, fresh) == 60
        assert waiting.result(LIMIT_SECONDS) == 60
        assert fresh.weights[1] == 0.25


def test_ranks_at_different_steps_part() -> None:
    one, two = socket.socketpair()
    ranks = Peer.__new__(Peer), Peer.__new__(Peer)
    ranks[0]._connection, ranks[1]._connection = one, two
    with one, two, ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks[1].all_reduce, 8, {1: 1.0}, 0.5)
        with pytest.raises(PeerLostError, match="step 8, this one at 7"):
            ranks[0].all_reduce(7, {1: 1.0}, 0.5)
        with pytest.raises(PeerLostError):
            other.result(LIMIT_SECONDS)
