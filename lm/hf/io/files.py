"""The safetensors of a folder in Hugging Face's format: one file, or several with an index."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm.errors import CheckpointError
from lm.storage.checkpoint import require_finite
from lm.storage.reading import read_json, refuse_pointer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_SHARDS = 10_000


class Files:
    """The tensors of a folder by name, read one by one."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where no safetensors can be read, or they hold other tensors than the index lists."""
        self._folder = folder
        if (folder / SINGLE).is_file():
            self._where = dict.fromkeys(_keys(folder / SINGLE), folder / SINGLE)
        elif (folder / INDEX).is_file():
            self._where = _indexed(folder)
        elif shards := sorted(folder.glob("model-*-of-*.safetensors")):
            self._where = _numbered(folder, shards)
        else:
            found = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
            if not found:
                raise CheckpointError(f"{folder}: {SINGLE} is missing, and so are any other weights that lm reads. Download them too.")
            pickles = f"{found[0]} is a pickle, which can run any code when it is read"
            raise CheckpointError(f"{folder}: {SINGLE} is missing; {pickles}. Convert the model to safetensors first.")
        self.names = set(self._where)

    def read(self, key: str) -> Tensor:
        """Returns a tensor. Raises CheckpointError where it cannot be read or is quantised, NumericsError where it is not finite."""
        file, tensor = self._where[key], self.tensor(key)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{file}: {key} is {tensor.dtype}, and fp32, fp16 or bf16 is needed. Use the unquantised model.")
        require_finite(key, tensor, str(file), "Use an earlier checkpoint of the model")
        return tensor

    def tensor(self, key: str) -> Tensor:
        """Returns a tensor as it is stored, unchecked. Raises CheckpointError where it is missing or cannot be read."""
        if (file := self._where.get(key)) is None:
            raise CheckpointError(f"{self._folder}: {key} is missing. Download the folder again.")
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {key} cannot be read ({error}). Download the file again.") from None
        return tensor


def _indexed(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor by the index. Raises CheckpointError where the files hold other tensors."""
    index = read_json(folder / INDEX, foreign=True).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / INDEX}: 'weight_map' is missing. Download the file again.")
    where = {str(key): _inside(folder, str(file)) for key, file in index.items()}
    if missing := sorted({file.name for file in where.values() if not file.exists()}):
        more, are = (f" and {len(missing) - 1} more", "are") if len(missing) > 1 else ("", "is")
        raise CheckpointError(f"{folder}: {missing[0]}{more}, which {INDEX} names, {are} missing. Download the rest too.")
    held = {(key, file) for file in set(where.values()) for key in _keys(file)}
    for key, file in sorted(where.items() - held):
        raise CheckpointError(f"{file}: {key} is not in it, and {INDEX} says that it is. Download both again.")
    for key, file in sorted(held - where.items()):
        raise CheckpointError(f"{file}: {key} is in it, and {INDEX} does not say so. Download both again.")
    return where


def _numbered(folder: Path, shards: list[Path]) -> dict[str, Path]:
    """Returns the file of each tensor where there is no index, only numbered shards. Raises CheckpointError where one of them is missing,
    or a tensor is in two."""
    n = int(last) if (last := shards[-1].stem.rpartition("-")[2]).isdecimal() else 0
    width = len(last)
    expected = [f"model-{i:0{width}}-of-{last}.safetensors" for i in range(1, min(n, MOST_SHARDS) + 1)]
    if [shard.name for shard in shards] != expected:
        raise CheckpointError(f"{folder}: of {n} shards {len(shards)} are there, and {INDEX} is missing. Download the folder again.")
    where: dict[str, Path] = {}
    for shard in shards:
        for key in _keys(shard):
            if (other := where.setdefault(key, shard)) != shard:
                raise CheckpointError(f"{folder}: {key} is in {other.name} and in {shard.name}. Download the folder again.")
    return where


def _keys(file: Path) -> list[str]:
    refuse_pointer(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: it cannot be read as safetensors ({error}). Download the file again.") from None


def _inside(folder: Path, file: str) -> Path:
    """Returns the path of a file beside the index. Raises CheckpointError for a name that points elsewhere."""
    if Path(file).name != file or not file.endswith(".safetensors"):
        raise CheckpointError(f"{folder / INDEX}: '{file}' is not the name of a safetensors file in this folder. Download the index again.")
    return folder / file
