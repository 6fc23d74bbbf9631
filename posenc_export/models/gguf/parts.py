"""Files into which llama.cpp splits a model: NAME-00001-of-00003.gguf and those that follow it."""

import re
from pathlib import Path
from typing import Any, Dict, List

from posenc_export.models.gguf.file import GGUFFile, GGUFTensor, read
from posenc_export.shared.refusal import refusal

PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # end of the name of a file that was split
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def read_parts(path: Path) -> List[GGUFFile]:
    """Return a file, or all the files that it was split into, the first first. Errors as for
    `read`; ValueError, too, if a part is missing, or says that it is another part.
    """
    first = read(path)
    count = _whole(first, COUNT, 1)
    if count < 2:
        return [first]
    name = PART.search(path.stem)
    if name is None or int(name[1]) != 1 or int(name[2]) != count:
        rule = f"the first of {count} files, NAME-00001-of-{count:05}.gguf"
        remedy = "give the first, with the others beside it"
        raise refusal("checkpoint", rule, path.name, remedy)
    stem = path.stem[: name.start()]
    names = [f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(2, count + 1)]
    files = [first, *(read(path.with_name(other)) for other in names)]
    for index, file in enumerate(files):
        for key, wanted in ((NUMBER, index), (COUNT, count)):
            if (number := _whole(file, key, wanted)) != wanted:
                raise _refusal(file, f"{key} to be {wanted}", number)
    tensors = sum(len(file.tensors) for file in files)
    if (number := _whole(first, TENSORS, tensors)) != tensors:
        raise _refusal(first, f"{TENSORS} to be {tensors}, as many as the files have", number)
    return files


def tensors_of(files: List[GGUFFile]) -> Dict[str, GGUFTensor]:
    """Return the tensors of all parts by name. ValueError: two parts have one."""
    tensors: Dict[str, GGUFTensor] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise _refusal(file, "tensors that no other part has", tensor.name)
            tensors[tensor.name] = tensor
    return tensors


def _whole(file: GGUFFile, key: str, default: int) -> int:
    number = file.values.get(key, default)
    if type(number) is not int or number < 0:
        raise _refusal(file, f"{key} to be a whole number", f"{number!r:.80}")
    return number


def _refusal(file: GGUFFile, rule: str, got: Any) -> ValueError:
    return refusal(f"gguf {file.path.name}", rule, got, "download the files again")
