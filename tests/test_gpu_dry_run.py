"""tools/gpu_dry_run.py, as far as a torch without CUDA goes."""

import pytest
import torch

from tools.gpu_dry_run import main


@pytest.mark.slow
def test_a_decoder_an_encoder_and_both_need_nothing_but_their_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["only=model=gpt2,model=bert_base,model=switch_base_8"]) == 0
    lines = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines[0][:1] == ["| model=bert_base"] and len(lines) == 3
    assert torch.version.cuda is not None or [line[1] for line in lines] == ["yes"] * 3
