"""Switch Transformers.  Fedus et al. 2021, arXiv:2101.03961."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.t5 import T5
from lm.hf.io.family import Pair, activation, embedding, hf_activation, module, without
from lm.hf.io.transforms import Stack
from lm.schema import Tree


class Switch(T5):
    """T5 1.0 with one of many feed-forward layers for each token, in every layer or every second one."""

    name = "switch_transformers"
    architecture = "SwitchTransformersForConditionalGeneration"
    fields = {
        **T5.fields,
        "ffn.n_experts": ("num_experts", 8),
        "ffn.router.bias": ("router_bias", False),
        "ffn.router.jitter": ("router_jitter_noise", 0.01),
        "ffn.balance_loss": ("router_aux_loss_coef", 0.001),
        "ffn.router_z_loss": ("router_z_loss_coef", 0.001),
    }
    further = (
        *T5.further, "expert_capacity", "num_sparse_encoder_layers", "num_sparse_decoder_layers", "encoder_sparse_step",
        "decoder_sparse_step",
    )  # fmt: skip
    fixed = {**T5.fixed, "ffn.kind": "moe", "ffn.top_k": 1, "ffn.router.kind": "softmax", "ffn.router.normalize": False}
    fixed_there = {"router_dtype": "float32"}

    def read(self, hf: Tree) -> Tree:
        return super().read({**hf, "scale_decoder_outputs": hf.get("tie_word_embeddings", True)})

    def write(self, ours: Tree) -> Tree:
        return without(super().write(ours), "scale_decoder_outputs")  # tying says it here

    def read_ffn(self, hf: Tree) -> Tree:
        one: Tree = {
            "kind": "mlp", "hidden": hf["d_ff"], "gated": False, "activation": activation(hf, "dense_act_fn", "relu"),
            "dropout": hf.get("dropout_rate", 0.1),
        }  # fmt: skip
        every = self.step(hf)
        return {
            "ffn.expert": one,
            "ffn.every": every,
            "ffn.dense": one if every > 1 else None,
            "ffn.capacity": hf.get("expert_capacity") or 64,
        }

    def step(self, hf: Tree) -> int:
        """Returns n where every n-th layer has experts, in both stacks alike: 1 or 2, since transformers counts other n from the second
        layer on. Raises ConfigError for others."""
        layers = (hf.get("num_layers", 12), hf.get("num_decoder_layers") or hf.get("num_layers", 12))
        sparse = (hf.get("num_sparse_encoder_layers", 3), hf.get("num_sparse_decoder_layers", 3))
        steps = {n // k if k else 0 for n, k in zip(layers, sparse, strict=True)}
        if len(steps) > 1 or not steps <= {1, 2}:
            raise ConfigError(
                f"config.json: num_sparse_encoder_layers={sparse[0]} of {layers[0]} and"
                f" num_sparse_decoder_layers={sparse[1]} of {layers[1]} have no place in lm's switch_transformers,"
                " which has experts in all layers or in every second. Import another model."
            )
        return steps.pop()

    def write_ffn(self, ours: Tree) -> Tree:
        every = ours["ffn.every"]
        return {
            "d_ff": ours["ffn.expert.hidden"],
            "dense_act_fn": hf_activation(ours["ffn.expert.activation"]),
            "expert_capacity": ours["ffn.capacity"],
            "num_sparse_encoder_layers": ours["n_encoder_layers"] // every,
            "num_sparse_decoder_layers": ours["n_layers"] // every,
        }

    def embedding(self, ours: Tree) -> Pair:
        return embedding(ours, "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a layer's feed-forward with experts, and of one without; the model has the tensors of one of them."""
        yield from module(f"{here}.router", f"{there}.mlp.router.classifier")
        for name, their_name in (("up", "wi"), ("down", "wo")):
            experts = tuple(f"{there}.mlp.experts.expert_{e}.{their_name}.weight" for e in range(ours["ffn.n_experts"]))
            yield Pair((f"{here}.experts.{name}",), experts, Stack())
            yield from module(f"{here}.{name}", f"{there}.mlp.{their_name}")


FAMILY = Switch()
