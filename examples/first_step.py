"""Run inside an image: import what the environment promises and take training steps on the CPU.

envbuilder launch ai-v4 -- python examples/first_step.py
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

LIBRARIES = ("transformers", "ray", "xgboost", "langchain", "mlflow")


def train(steps: int) -> tuple[float, float]:
    """Fit a small network to a known function; return the first and the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main() -> None:
    """Print versions and losses; fail when nothing was learned."""
    print(f"torch {torch.__version__} (CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs)")
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            print(f"{name} {importlib.import_module(name).__version__}")
    first, last = train(50)
    print(f"loss {first:.3f} -> {last:.3f}")
    if not last < first / 2:
        raise SystemExit("the training step does not work")


if __name__ == "__main__":
    main()
