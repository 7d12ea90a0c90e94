"""What imitating lucky steps costs where moves are random: slippery FrozenLake, without a network.

Run from the project's root, a minute::

    python benchmarks/imitation_bias.py

A step that happened to end well is imitated though its action was no better than another
(https://arxiv.org/abs/1806.05635, section 4.2). Here nothing else is learned: the policy is a
table, the critic its exact value, and every round moves the policy towards what is imitated in
episodes of its own,

    policy(a | s) <- (1 - step) policy(a | s) + step * sum of f at (s, a) / sum of f at s.

Three forms of the weight f are compared with the best policy: the real return alone, the package's
(the real return decides whether, the lambda return how much), and one step of the true model,
f = max(Q(s, a) - V(s), 0), which knows no luck.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch

from lore_torchrl.objectives.imitation import imitation_weight

DISCOUNT, LAMBDA = 1.0 - 1.0 / 333.0, 0.95
MAX_STEPS = 100
FORMS = ("real return", "package", "one step of the model")


class Lake:
    """The transition table of a slippery lake: states ``S``, actions ``A``."""

    def __init__(self, map_name: str) -> None:
        table = gym.make("FrozenLake-v1", map_name=map_name, is_slippery=True).unwrapped.P
        num_states, num_actions = len(table), len(table[0])
        self.next = np.zeros((num_states, num_actions, num_states))
        self.reward = np.zeros((num_states, num_actions))
        self.ends = np.zeros(num_states, dtype=bool)
        for state, moves in table.items():
            for action, outcomes in moves.items():
                for probability, after, reward, terminated in outcomes:
                    self.next[state, action, after] += probability
                    self.reward[state, action] += probability * reward
                    self.ends[after] |= terminated
        # What is done where an episode has ended counts for nothing.
        self.next[self.ends], self.reward[self.ends] = 0.0, 0.0
        self.goal = num_states - 1

    def value(self, policy: np.ndarray) -> np.ndarray:
        """Return the exact discounted value of each state, ``[S]``."""
        move = np.einsum("sa,sat->st", policy, self.next)
        reward = (policy * self.reward).sum(1)
        return np.linalg.solve(np.eye(len(move)) - DISCOUNT * move, reward)

    def action_value(self, value: np.ndarray) -> np.ndarray:
        """Return the exact discounted value of each action, ``[S, A]``."""
        return self.reward + DISCOUNT * self.next @ value

    def success(self, policy: np.ndarray) -> float:
        """Return the exact probability to reach the goal within the step limit."""
        reached = np.zeros(len(policy))
        for _ in range(MAX_STEPS):
            reached = np.einsum("sa,sat,t->s", policy, self.next, reached) + (
                policy * self.reward
            ).sum(1)
        return reached[0]

    def best(self) -> np.ndarray:
        """Return the optimal policy, one-hot, by policy iteration."""
        policy = np.full(self.reward.shape, 1.0 / self.reward.shape[1])
        for _ in range(100):
            policy = np.eye(policy.shape[1])[self.action_value(self.value(policy)).argmax(1)]
        return policy

    def play(
        self, policy: np.ndarray, episodes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Return state, action, reward and next state of episodes, ``[T, N]``; -1 after an end."""
        state, rows = np.zeros(episodes, dtype=int), []
        alive = np.ones(episodes, dtype=bool)
        for _ in range(MAX_STEPS):
            action = (policy[state].cumsum(1) > rng.random((episodes, 1))).argmax(1)
            draw = rng.random((episodes, 1))
            move = self.next[state, action].cumsum(1)
            after = np.where(alive, (move > draw).argmax(1), state)
            reward = (alive & (after == self.goal)).astype(float)
            rows.append((np.where(alive, state, -1), action, reward, after))
            alive &= ~self.ends[after]
            state = after
            if not alive.any():
                break
        return tuple(map(np.array, zip(*rows, strict=True)))


def weights(lake: Lake, form: str, value: np.ndarray, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return how much each step of some episodes is imitated, ``[T, N]``."""
    state, action, reward, after = steps
    if form == "one step of the model":
        return np.maximum(lake.action_value(value)[state, action] - value[state], 0.0)
    # A truncated episode goes on with the critic's value, as in replay.
    real = lam = np.where(lake.ends[after[-1]], 0.0, value[after[-1]])
    reals, lams = np.zeros(state.shape), np.zeros(state.shape)
    for t in reversed(range(len(state))):
        goes_on = ~lake.ends[after[t]] & (state[t] >= 0)
        then = (1.0 - LAMBDA) * value[after[t]] + LAMBDA * lam
        real = reward[t] + DISCOUNT * np.where(goes_on, real, 0.0)
        lam = reward[t] + DISCOUNT * np.where(goes_on, then, 0.0)
        reals[t], lams[t] = real, lam
        if t and (ended := state[t] < 0).any():
            # Before the end stands nothing yet; what follows it is not part of the episode.
            real, lam = np.where(ended, 0.0, real), np.where(ended, 0.0, lam)
    expected = torch.from_numpy(value[state])
    reals, lams = torch.from_numpy(reals), torch.from_numpy(lams)
    gain = reals if form == "real return" else lams
    return imitation_weight(gain, expected, reals).numpy()


def learn(lake: Lake, form: str, args: argparse.Namespace, seed: int) -> np.ndarray:
    """Return the success after each round, ``[rounds]``."""
    rng = np.random.default_rng(seed)
    num_states, num_actions = lake.reward.shape
    policy, found = np.full((num_states, num_actions), 1.0 / num_actions), []
    for _ in range(args.rounds):
        # DreamerV3's share of uniform probability.
        acting = 0.99 * policy + 0.01 / num_actions
        steps = lake.play(acting, args.episodes, rng)
        weight = weights(lake, form, lake.value(acting), steps)
        state, action = steps[:2]
        total = np.zeros_like(policy)
        np.add.at(total, (state[state >= 0], action[state >= 0]), weight[state >= 0])
        share = total / np.maximum(total.sum(1, keepdims=True), 1e-12)
        seen = total.sum(1, keepdims=True) > 0
        policy = np.where(seen, (1 - args.step) * policy + args.step * share, policy)
        found.append(lake.success(acting))
    return np.array(found)


def main() -> None:
    """Print the success of each form beside the best policy's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=500, help="in a round")
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--map", default="4x4", choices=("4x4", "8x8"))
    args = parser.parse_args()
    lake = Lake(args.map)
    uniform = np.full(lake.reward.shape, 1.0 / lake.reward.shape[1])
    print(f"{'uniform policy':24s} {lake.success(uniform):.3f}")
    print(f"{'best policy':24s} {lake.success(lake.best()):.3f}")
    shown = [args.rounds // 10, args.rounds // 2, args.rounds]
    for form in FORMS:
        curves = np.array([learn(lake, form, args, seed) for seed in range(args.seeds)])
        cells = "   ".join(
            f"{n} rounds {curves[:, n - 1].mean():.3f} "
            f"[{curves[:, n - 1].min():.3f}, {curves[:, n - 1].max():.3f}]"
            for n in shown
        )
        print(f"{form:24s} {cells}")


if __name__ == "__main__":
    main()
