"""PyTorch's optimizers on the CPU, whose state is named to a stand-in for the shim: `optimizers.py REPORT`.

The stand-in is a library that writes each range to the file REPORT. What a test wants to know is compared here, where
the tensors are."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import xmig_naming  # type: ignore[import-not-found]  # the module that is loaded into this program

xmig_naming.on_device = lambda tensor: True  # what this PyTorch has is in host memory
report = Path(sys.argv[1])
os.environ["REPORT"] = str(report)


def named(optimizer: Any, *entries: str) -> None:
    """After a step: exactly the tensors of these entries, with their sizes and types."""
    report.write_text("")
    optimizer.step()
    found = {tuple(map(int, line.split())) for line in report.read_text().splitlines() if line[0].isdigit()}
    expected = {
        (state[entry].data_ptr(), state[entry].nbytes, xmig_naming.TYPES[str(state[entry].dtype)], 1)
        for state in optimizer.state.values()
        for entry in entries
    }
    assert found == expected, (found, expected)
    assert len(expected) == len(entries) * len(optimizer.state)


def forgotten() -> set[tuple[int, ...]]:
    lines = [line.split() for line in report.read_text().splitlines()]
    return {tuple(map(int, line[1:])) for line in lines if line[0] == "forget"}


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 4)).to(dtype)
    made.to(memory_format=torch.channels_last)(torch.ones(2, 3, 8, 8, dtype=dtype)).square().sum().backward()
    return made


assert os.environ["CHAINED"] == "1", "the sitecustomize that is hidden was imported, too"
for kind in (torch.float32, torch.bfloat16):
    adam = torch.optim.AdamW(model(kind).parameters(), amsgrad=True)
    named(adam, "exp_avg", "exp_avg_sq")  # neither `step` nor `max_exp_avg_sq`, which is not in the list
    named(adam, "exp_avg", "exp_avg_sq")
    adam.load_state_dict(adam.state_dict())  # other tensors
    named(adam, "exp_avg", "exp_avg_sq")
named(torch.optim.SGD(model().parameters(), momentum=0.9), "momentum_buffer")
named(torch.optim.SGD(model().parameters()))  # it has none

# What an optimizer has no longer is named no longer, though somebody else keeps the tensor: nor what a dead one had.
adam = torch.optim.AdamW(model().parameters())
named(adam, "exp_avg", "exp_avg_sq")
parts = [state["exp_avg"] for state in adam.state.values()]
for state in adam.state.values():
    state["exp_avg"] = state["exp_avg"].clone()
named(adam, "exp_avg", "exp_avg_sq")
assert forgotten() == {(one.data_ptr(), one.nbytes) for one in parts}
parts = [state[entry] for state in adam.state.values() for entry in ("exp_avg", "exp_avg_sq")]
report.write_text("")
del adam
gc.collect()
assert forgotten() == {(one.data_ptr(), one.nbytes) for one in parts}


class OfParameters(torch.optim.Optimizer):  # type: ignore[misc]
    """One whose state is not only its own: nothing of a parameter may be named."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.detach()[:1]
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.int32)
                gaps, repeated = torch.ones(4, 6)[:, ::2], torch.ones(4)[2:3].expand(4)
                self.state[parameter]["momentum_buffer"] = gaps if parameter.dim() > 1 else repeated


named(OfParameters(model().parameters(), {}))

# The last one: what fails does not reach the program, and is printed once.
failing = torch.optim.AdamW(model().parameters())
xmig_naming.state_of = lambda optimizer: 1 / 0
for _ in range(3):
    failing.step()
print("done")
