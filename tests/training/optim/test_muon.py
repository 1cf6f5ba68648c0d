import pytest
import torch
from torch import Tensor, nn

from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.muon import Iteration, MuonAdamW, MuonConfig, orthogonalize
from tests.training.optim.optimizers import begun


def newton_schulz_of_one(gradient: Tensor) -> Tensor:
    """Jordan's published function, for one matrix, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.double() / (gradient.double().norm() + 1e-7)
    if gradient.shape[0] > gradient.shape[1]:
        x = x.T
    for _ in range(5):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 16, 40), (3, 40, 16), (1, 8, 8)])
def test_batched_equals_the_reference_of_one_matrix(shape: tuple[int, int, int]) -> None:
    scales = torch.tensor([1e-3, 1.0, 30.0, 5.0])[: shape[0], None, None]
    gradients = scales * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    batch = orthogonalize(gradients)
    for gradient, found in zip(gradients, batch, strict=True):
        torch.testing.assert_close(found.double(), newton_schulz_of_one(gradient), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("iteration", "least", "most"), [("quintic", 0.6, 1.3), ("polar_express", 0.8, 1.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 24, 24), (2, 24, 64), (2, 64, 24)])
def test_singular_values_land_near_one_with_the_same_singular_vectors(
    shape: tuple[int, int, int], dtype: torch.dtype, iteration: Iteration, least: float, most: float
) -> None:
    gradients = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(gradients.to(dtype), iteration).double()
    u, s, vh = torch.linalg.svd(gradients.double(), full_matrices=False)
    kept = s > 0.01 * s[:, :1]  # the quintic lifts a part of 0.01 to about 0.7
    rotated = u.mT @ found @ vh.mT
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    assert diagonal[kept].min() > least
    assert diagonal.max() < most
    tolerance = 1e-4 if dtype == torch.float32 else 0.1  # bf16 keeps 8 bits over 5 steps
    assert (rotated - torch.diag_embed(diagonal)).abs().max() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_express_is_not_carried_away_by_rounding(width: int, dtype: torch.dtype) -> None:
    """Of rank one and a little, and all alike: singular values at the ends of what its polynomials are made for. Seen to fail (9,200 in
    bf16) without the factors of `_safe`."""
    noise = torch.randn(8, width, width, generator=torch.Generator().manual_seed(3))
    for matrices in (noise[..., :1] @ noise[..., :1, :] + 1e-3 * noise, torch.linalg.qr(noise)[0], noise):
        found = torch.linalg.svdvals(orthogonalize(matrices.to(dtype), "polar_express").double())
        assert found.max() < 1.15


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 4)), torch.zeros(2, 4, 4))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (16, 16), "b": (16, 16), "wide": (16, 40), "tall": (40, 16), "embed": (20, 16), "bias": (16,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def set_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


CFG = MuonConfig(lr=0.1, momentum=0.9, weight_decay=0.2, adam_lr=0.01, adam_weight_decay=0.1)
MATRICES = {"a", "b", "wide", "tall"}


def test_steps_equal_a_plain_loop_over_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.training.optim.muon.fast_dtype", lambda device: torch.float32)
    params, plain = parameters(), parameters()
    optimizer = begun(CFG, params.items(), MATRICES)
    momenta = {name: torch.zeros_like(plain[name]) for name in MATRICES}
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(plain, seed)
        optimizer.step()
        for name in MATRICES:
            p, m = plain[name].data, momenta[name]
            m.mul_(0.9).add_(plain[name].grad, alpha=0.1)
            update = newton_schulz_of_one(0.1 * plain[name].grad + 0.9 * m).float()
            p.mul_(1 - 0.1 * 0.2).add_(update, alpha=-0.1 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
    for name in MATRICES:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(optimizer.state[params[name]]["momentum"], momenta[name], rtol=1e-5, atol=1e-6)


def test_cautious_decay_spares_the_elements_that_the_step_takes_away_from_zero() -> None:
    plain, cautious, decayed = parameters(), parameters(), parameters()
    configs = CFG.replace(weight_decay=0.0), CFG.replace(cautious_decay=True), CFG
    for params, cfg in zip((plain, cautious, decayed), configs, strict=True):
        optimizer = begun(cfg, params.items(), MATRICES)
        set_gradients(params, 0)
        optimizer.step()
    before = parameters()
    for name in MATRICES:
        towards = (plain[name] - before[name]).sign() == -before[name].sign()
        assert 0.2 < towards.float().mean() < 0.8
        torch.testing.assert_close(cautious[name], torch.where(towards, decayed[name], plain[name]), rtol=0, atol=0)


def test_rows_are_divided_as_normuon_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1 of Li et al. 2025 in a plain loop, with the norm of Muon's own update. At first all rows move alike."""
    monkeypatch.setattr("lm.training.optim.muon.fast_dtype", lambda device: torch.float32)
    params, plain = parameters(), parameters()
    optimizer = begun(CFG.replace(row_beta2=0.9), params.items(), MATRICES)
    momenta = {name: torch.zeros_like(plain[name]) for name in MATRICES}
    squares = {name: torch.zeros(len(plain[name])) for name in MATRICES}
    for seed in range(3):
        for each in (params, plain):
            set_gradients(each, seed)
            for name in MATRICES:
                each[name].grad[0] *= 1e-3
        optimizer.step()
        for name in MATRICES:
            p, m, v = plain[name].data, momenta[name], squares[name]
            m.mul_(0.9).add_(plain[name].grad, alpha=0.1)
            update = newton_schulz_of_one(0.1 * plain[name].grad + 0.9 * m).float()
            v.mul_(0.9).add_((update**2).mean(1), alpha=0.1)
            even = update / v.sqrt()[:, None]
            even *= update.norm() / even.norm()
            if seed == 0:
                torch.testing.assert_close(even.norm(dim=1), even.norm(dim=1).mean().expand(len(even)))
            p.mul_(1 - 0.1 * 0.2).add_(even, alpha=-0.1 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
    for name in MATRICES:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(optimizer.state[params[name]]["row_square"][:, 0], squares[name], rtol=1e-4, atol=1e-6)


def test_the_rest_steps_as_adamw_alone_would() -> None:
    params, plain = parameters(), parameters()
    rest = ["embed", "bias"]
    optimizer = begun(CFG, params.items(), MATRICES)
    reference = begun(AdamWConfig(lr=0.01, weight_decay=0.1), [(name, plain[name]) for name in rest], ())
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(plain, seed)
        optimizer.step()
        reference.step()
    assert all(torch.equal(params[name], plain[name]) for name in rest)


def test_batched_steps_equal_an_optimizer_per_matrix() -> None:
    params, alone = parameters(), parameters()
    together = begun(CFG, params.items(), MATRICES)
    singles = [begun(CFG, [(name, p)], MATRICES) for name, p in alone.items()]
    set_gradients(params, 0)
    set_gradients(alone, 0)
    together.step()
    for single in singles:
        single.step()
    for name in params:
        torch.testing.assert_close(params[name], alone[name], rtol=0, atol=1e-3)  # lr 0.1 x the rounding of bf16


def test_an_update_does_not_depend_on_the_scale_of_the_gradient() -> None:
    results = []
    for scale in (1.0, 1024.0):
        params = parameters()
        optimizer = begun(CFG, params.items(), MATRICES)
        set_gradients(params, 0)
        for p in params.values():
            p.grad.mul_(scale)
        optimizer.step()
        results.append(params["wide"].detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-3)


def test_bf16_weights_keep_a_float32_momentum() -> None:
    params = parameters(torch.bfloat16)
    optimizer = begun(CFG, params.items(), MATRICES)
    before = params["a"].detach().clone()
    set_gradients(params, 0)
    optimizer.step()
    assert params["a"].dtype == torch.bfloat16
    assert not torch.equal(params["a"], before)
    assert optimizer.state[params["a"]]["momentum"].dtype == torch.float32


def test_parameters_without_a_gradient_are_left_alone() -> None:
    params = parameters()
    optimizer = begun(CFG, params.items(), MATRICES)
    assert isinstance(optimizer, MuonAdamW)
    before = {name: p.detach().clone() for name, p in params.items()}
    params["a"].grad = torch.ones(16, 16)
    optimizer.step()
    assert [name for name in params if not torch.equal(params[name], before[name])] == ["a"]


def test_a_stack_of_matrices_steps_as_its_matrices_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    stack, gradient = torch.randn(3, 40, 16, generator=generator), torch.randn(3, 40, 16, generator=generator)
    together = {"experts.up": nn.Parameter(stack.clone()), "other": nn.Parameter(stack.clone())}
    alone = {f"up{i}": nn.Parameter(matrix.clone()) for i, matrix in enumerate(stack)}
    for params, grads in ((together, [gradient, -gradient]), (alone, list(gradient))):
        for p, grad in zip(params.values(), grads, strict=True):
            p.grad = grad.clone()
        begun(CFG, params.items(), set(params)).step()
    torch.testing.assert_close(together["experts.up"], torch.stack(list(alone.values())), rtol=0, atol=1e-3)
    assert (together["experts.up"] - stack).abs().max() > 0.01
