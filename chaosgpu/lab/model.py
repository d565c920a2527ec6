"""What the rehearsal job trains: logistic regression on sparse, hashed features, with Adagrad, in plain Python.

Small, but a real optimisation: the loss falls, a lost update shows, and a checkpoint holds all that a restart needs.
"""

import math
import random
from array import array

FEATURES = 65536
SAMPLES_PER_STEP = 16
FEATURES_PER_SAMPLE = 8
LEARNING_RATE = 0.3

Gradient = dict[int, float]


class Model:
    """Weights and Adagrad's sums of squared gradients: two arrays of FEATURES doubles, the same on every rank."""

    def __init__(self) -> None:
        self.weights = array("d", bytes(8 * FEATURES))
        self.squares = array("d", bytes(8 * FEATURES))

    def gradient(self, rank: int, step: int) -> tuple[Gradient, float]:
        """The gradient of one rank's share of a step's batch, and the mean log loss before the update."""
        draw = random.Random(step * 64 + rank)
        gradient: Gradient = {}
        loss = 0.0
        for _ in range(SAMPLES_PER_STEP):
            # Rank-frequency as in natural data: the first features are in most samples, the last in hardly any.
            features = [int(FEATURES ** draw.random()) - 1 for _ in range(FEATURES_PER_SAMPLE)]
            label = draw.random() < _sigmoid(sum(map(_truth, features)))
            guess = _sigmoid(sum(self.weights[feature] for feature in features))
            loss -= math.log(guess if label else 1 - guess)
            for feature in features:
                gradient[feature] = gradient.get(feature, 0.0) + (guess - label) / SAMPLES_PER_STEP
        return gradient, loss / SAMPLES_PER_STEP

    def apply(self, gradient: Gradient) -> None:
        """Take one Adagrad step (Duchi et al. 2011)."""
        for feature, slope in gradient.items():
            self.squares[feature] += slope * slope
            self.weights[feature] -= LEARNING_RATE * slope / math.sqrt(self.squares[feature] + 1e-8)


def _truth(feature: int) -> float:
    """The weight that generated the data: -1 to 1, scattered by Knuth's multiplicative hash."""
    return (feature * 2654435761 % 2**32) / 2**31 - 1


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
