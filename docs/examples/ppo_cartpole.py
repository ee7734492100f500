"""PPO on CartPole, in plain torch: two workers act with the policy while the trainer improves it."""

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical
from torch.nn import Linear, Sequential, Tanh

from weightsync import Worker, WorkerGroup, WorkerResult


def act(worker: Worker) -> None:
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=worker.index)
    while not worker.stopped:
        rows = []
        for _ in range(256):  # a new version may go live before each step
            out = worker.model(torch.as_tensor(seen)).detach()
            action = Categorical(logits=out[:2]).sample()
            following, _, fell, cut, _ = env.step(action.item())
            rows.append((seen, action, Categorical(logits=out[:2]).log_prob(action), out[2], fell or cut))
            seen = env.reset()[0] if fell or cut else following
        worker.put([torch.as_tensor(np.array(column)) for column in zip(*rows)])


def learn(policy: Sequential, optimizer: torch.optim.Optimizer, result: WorkerResult) -> float:
    seen, actions, logs, values, ends = result.value
    returns, later = torch.zeros_like(values), values[-1]
    for step in reversed(range(len(values))):
        later = returns[step] = 1 + 0.98 * later * ~ends[step]
    gains = (returns - values - (returns - values).mean()) / (returns - values).std()
    for _ in range(10):
        out = policy(seen)
        ratio = (Categorical(logits=out[:, :2]).log_prob(actions) - logs).exp()
        loss = (out[:, 2] - returns).square().mean() / 100 - (ratio.clamp(0.8, 1.2) * gains).min(ratio * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return len(ends) / max(1, ends.sum().item())


def main(updates: int = 150) -> None:
    policy = Sequential(Linear(4, 64), Tanh(), Linear(64, 3))  # two logits, and a value
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with WorkerGroup(act, policy, num_workers=2, max_restarts=3) as group:
        for update, result in zip(range(updates), group.results()):
            steps = learn(policy, optimizer, result)
            group.send_async()  # the newest wins; a worker takes it between two steps
            print(f"update {update}: acted with versions {result.versions}, {steps:.0f} steps an episode")


if __name__ == "__main__":
    main()
