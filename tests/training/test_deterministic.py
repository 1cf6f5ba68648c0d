"""What steps that repeat to the bit change in torch, and that it is undone behind them."""

import warnings

import pytest
import torch

from lm.training.deterministic import deterministic


def flags() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009  # torch does not declare it
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


@pytest.mark.parametrize("before", [False, True])
def test_torch_is_as_before_behind_them(before: bool) -> None:
    usual = flags()
    try:
        torch.use_deterministic_algorithms(before)
        given = flags()
        with pytest.raises(KeyboardInterrupt), deterministic(True):
            assert flags() == (True, True, False, False)
            raise KeyboardInterrupt
        assert flags() == given
        with deterministic(False):
            assert flags() == given
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags() == usual


def test_what_adds_in_no_fixed_order_warns() -> None:
    with deterministic(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert any("deterministic" in str(each.message) for each in caught)


def test_a_compiler_asks_again_whether_they_repeat() -> None:
    @torch.compile(backend="eager")
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + torch.are_deterministic_algorithms_enabled()

    for on in (False, True, False):
        with deterministic(on):
            assert float(asked(torch.zeros(()))) == on
