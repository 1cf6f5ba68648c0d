"""How a server listens, and how much it takes at once."""

from pydantic import Field

from lm.schema import MOST, Config


class ServeConfig(Config):
    """How a model is served."""

    other_names = {
        "host": "address bind ip",
        "key_env": "api_key",
        "name": "alias model_name served_model_name",
        "queue": "max_queue_size",
        "rows": "max_batch_size max_num_seqs parallel slots",
        "tokens": "gpu_memory_utilization max_total_tokens",
    }

    port: int = Field(8000, ge=0, le=65535)
    """Where it listens; 0: a free one, which is told."""
    host: str = "127.0.0.1"
    """The address it listens on; 0.0.0.0 is all of this machine's, for everyone who reaches it."""
    name: str | None = None
    """What requests call the model. null: the run's or folder's name."""
    key_env: str | None = None
    """The environment variable that holds the key which requests to /v1 must bring. null: they need none."""
    rows: int = Field(32, gt=0, le=1024)
    """Samples decoded together; more wait."""
    prefill_chunk: int = Field(512, gt=0, le=MOST)
    """Tokens of prompts that are read between two tokens of the samples: fewer need less memory, and make those wait less."""
    queue: int = Field(256, gt=0, le=MOST)
    """Requests in hand, decoded and waiting; the next is answered 429."""
    tokens: int | None = Field(None, gt=0, le=MOST)
    """Most tokens of a prompt and its answer together. null: twice the model's context."""
    body_kib: int = Field(1024, gt=0, le=MOST)
    """Largest request, in KiB; a larger one is answered 413."""
    patience_s: int = Field(60, gt=0, le=86400)
    """Seconds that a client has to send a request, and to take more of an answer; its connection is closed then."""
    drain_s: int = Field(30, ge=0, le=86400)
    """Seconds that running requests have left after SIGTERM or Ctrl-C."""
