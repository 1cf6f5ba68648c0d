"""`lm serve` as a process: its port, its signals, what it refuses before it listens."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.server import Process


@pytest.fixture
def folder(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> Path:
    save_model(tmp_path / "runs" / "x" / "model", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return tmp_path / "runs" / "x"


def test_what_cannot_be_served_is_told_in_one_sentence(lm: Lm, folder: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = lm("serve", f"from={folder}", f"port={port}")
        assert (code, out) == (5, "") and err.startswith(f"port: {port} on 127.0.0.1 cannot be had") and len(err.splitlines()) == 1
    refused = {
        (f"from={folder}", "host=nowhere.invalid"): "'nowhere.invalid' is no address of this machine",
        (f"from={folder}", "host=192.0.2.1"): "host: '192.0.2.1' is no address of this machine",
        (f"from={folder}", "key_env=LM_NO_SUCH"): "the environment variable LM_NO_SUCH is empty or not set",
        (f"from={folder}", "prot=1"): "Did you mean 'port'?",
    }
    for args, says in refused.items():
        code, out, err = lm("serve", *args, *(() if "port" in says else ("port=0",)))
        assert (code, out) == (2, "") and says in err.splitlines()[-1], err
    for name in [name for name in sys.modules if name.startswith(("lm.serving.run", "lm.serving.app", "uvicorn", "fastapi"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = lm("serve", f"from={folder}", "port=0")
    assert code == 2 and err == "lm serve needs the package uvicorn. Run: pip install 'slotlm[serve]'\n"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_what_is_in_hand_end(server: Path, folder: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = Process(server, tmp_path, ["-m", "lm", "serve", f"from={folder}", "port=0"])
    try:
        while not process.stdout.strip():
            assert process.alive(), process.stderr
            time.sleep(0.05)
        url = process.stdout.split()[0]
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "logit_bias": {"256": -100, "257": -100, "258": -100}}
        chunks: list[str] = []

        def ask() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                chunks.extend(line for line in answer.iter_lines() if line)

        thread = threading.Thread(target=ask)
        thread.start()
        while not chunks:
            time.sleep(0.01)

        os.kill(process.pid, number)
        thread.join()
        assert chunks[-1] == "data: [DONE]"
        assert json.loads(chunks[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait() == code
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert len(process.stderr.splitlines()) == 1
    finally:
        if process.alive():
            os.kill(process.pid, signal.SIGKILL)
