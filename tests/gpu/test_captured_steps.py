"""A CUDA graph of a whole training iteration has the bits of iterations that are not captured."""

import functools

import pytest
import torch

import halfstep_torch as hs

MAKES = {
    "default": hs.AdamW,
    "eight bits": functools.partial(hs.AdamW, recipe="eight_bit"),
    "feedback": functools.partial(hs.AdamW, param_storage="feedback"),
    "split16": functools.partial(hs.AdamW, param_storage="split16"),
}
WARM, REPLAYED = 3, 20


class Training:
    """A model, its optimizer, and the memory of a batch.

    No layer is a matrix product, for which libraries may choose other algorithms in a graph.
    """

    def __init__(self, make, device: str, **options) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"inner": (64, 300), "bias": (300,), "outer": (300,), "scale": ()}
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        params = {name: torch.nn.Parameter(x.to(device, torch.bfloat16)) for name, x in drawn.items()}
        self.params, self.rate = params, torch.tensor(1e-2, device=device)
        self.optimizer = make(params.items(), self.rate, weight_decay=0.1, compile="auto", **options)
        self.batch = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)

    def give(self, step: int) -> None:
        """Write the batch and the rate of a step into their memory."""
        generator = torch.Generator().manual_seed(step + 1)
        self.batch.copy_(torch.randn(self.batch.shape, generator=generator))
        self.rate.fill_(1e-2 / (step + 1))

    def iterate(self) -> None:
        """Make one iteration, from forward to the step."""
        p = self.params
        hidden = torch.tanh(self.batch[:, :, None] * p["inner"] + p["bias"]).sum(1)
        ((hidden * p["outer"]).sum(1) * p["scale"] - 1).square().sum().backward()
        self.optimizer.step()

    def bits(self) -> dict[str, torch.Tensor]:
        """Return weights and state."""
        states = {
            f"{name} {key}": x
            for name, p in self.params.items()
            for key, x in self.optimizer.state[p].items()
        }
        return {name: x.detach().cpu() for name, x in (self.params | states).items()}


def warmed_up(training: Training) -> Training:
    """Make iterations on a stream of their own, as PyTorch's notes on CUDA graphs ask for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(WARM):
            training.give(step)
            training.optimizer.zero_grad(set_to_none=True)
            training.iterate()
    torch.cuda.current_stream().wait_stream(stream)
    training.optimizer.zero_grad(set_to_none=True)
    return training


@pytest.fixture
def cuda(device):
    """Return the device; only CUDA has graphs."""
    if device != "cuda":
        pytest.skip("needs CUDA graphs")
    return device


@pytest.mark.parametrize("name", MAKES)
def test_a_captured_iteration_has_the_bits_of_plain_ones(name, cuda):
    ours, plain = warmed_up(Training(MAKES[name], cuda, capturable=True)), Training(MAKES[name], cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.iterate()
    for step in range(WARM + REPLAYED):
        plain.give(step)
        plain.optimizer.zero_grad(set_to_none=True)
        plain.iterate()
        if step >= WARM:
            ours.give(step)
            graph.replay()
    counts = {state["step"] for state in ours.optimizer.state.values()}
    assert {(count.device.type, int(count)) for count in counts} == {(cuda, WARM + REPLAYED)}
    found, right = ours.bits(), plain.bits()
    assert {name for name, x in found.items() if not torch.equal(x, right[name])} == set()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_that_is_not_capturable_is_named_in_a_capture(cuda):
    training = warmed_up(Training(hs.AdamW, cuda))
    training.iterate()
    with pytest.raises(RuntimeError, match="capturable of param group 0 is False"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            training.optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_weight_without_gradient_is_named_in_a_capture(cuda):
    training = warmed_up(Training(hs.AdamW, cuda, capturable=True))
    training.iterate()
    training.params["bias"].grad = None
    with pytest.raises(RuntimeError, match="the weight 'bias' has no gradient in this capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            training.optimizer.step()


def test_replays_change_nothing_after_a_load(cuda):
    training = warmed_up(Training(hs.AdamW, cuda, capturable=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.iterate()
    graph.replay()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    before = training.bits()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, before[name]) for name, x in training.bits().items())
    assert training.optimizer.param_groups[0]["lr"].device.type == "cuda"
    assert {state["step"].device.type for state in training.optimizer.state.values()} == {"cuda"}
