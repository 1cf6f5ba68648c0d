"""`lm serve from=FOLDER port=8000`: a model behind OpenAI's API, and a page to chat with it."""

from lm.cli.verb import Decoding
from lm.errors import ConfigError
from lm.printing import note, say
from lm.progress import quiet
from lm.serving.config import ServeConfig
from lm.storage.model_folder import resolve_model


class Serve(Decoding, ServeConfig):
    """usage: lm serve from=FOLDER [key=value ...]

    Answers /v1/completions, /v1/chat/completions, /v1/embeddings and /v1/models as OpenAI's API does, with the options and defaults of
    `lm generate`: the same seed and settings give the same text, whoever else is being answered. An encoder, or a classifier, continues no
    text and has vectors alone. /health and /metrics are for machines, / is a page to chat with. Requests join and leave the running batch
    at every token. SIGTERM and Ctrl-C let what is in hand end first.
    """

    other_names = {**Decoding.other_names, **ServeConfig.other_names}

    def run(self, rest: list[str]) -> None:
        """Prints where it listens on stdout."""
        self.refuse(rest)
        folder = resolve_model(self.from_)
        try:
            from lm.serving.run import Server, listening, name_of
        except ModuleNotFoundError as error:
            raise ConfigError(f"lm serve needs the package {error.name}. Run: pip install 'slotlm[serve]'") from None
        with listening(self) as listener:
            from lm.generation.load import load

            model, tokenizer = load(folder, self.device, dtype=self.dtype, cache=self.cache, compile=self.compile)
            server = Server(model, tokenizer, self.name or name_of(folder), self)
            host, port = listener.getsockname()[:2]
            say(f"http://{f'[{host}]' if ':' in host else host}:{port}  {self.name or name_of(folder)}")
            if self.host not in ("127.0.0.1", "::1", "localhost") and self.key_env is None:
                note("host: everyone who reaches this machine can use the model. Set key_env, or host=127.0.0.1.")
            with quiet():
                server.serve_at(listener)
