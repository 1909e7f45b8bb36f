"""Load weights from torch's pickled files (.bin, .pt, .pth)."""

import pickle
import re
import zipfile
from pathlib import Path

import torch

from llava_ds.constants import DataError
from llava_ds.files.model_files import shown


def load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a pickled file. Files since torch 1.6 are mapped into memory. Raises DataError."""
    try:
        if (mapped := zipfile.is_zipfile(file)) and (packed := _compressed(file)):
            raise DataError(f"{file} is refused: its {packed} is compressed, unlike torch's files: copy it again")
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        named = refused_name(error)
        if named is None:
            raise DataError(f"{file} can't be read as weights (the file is incomplete): copy it again") from error
        raise DataError(
            f"{file} is refused: it holds {named} in addition to tensors, and code in weight files is not run: "
            "save only the tensors, best as safetensors"
        ) from error
    except Exception as error:  # torch raises several types for damaged files
        raise DataError(f"{file} can't be read as weights ({_first_line(error)}): copy it again") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise DataError(f"{file} can't be read as weights: expected tensors by name and nothing else")
    if strange := [name for name, tensor in found.items() if not _is_plain(name, tensor)]:
        raise DataError(
            f"{file} can't be read as weights: expected dense tensors with all their numbers in the file, but "
            f"{shown(strange[0])} is different"
        )
    return found


def _compressed(file: Path) -> str | None:
    """Return the name of a compressed member of a zip file, or None. A small member could expand to fill the memory."""
    with zipfile.ZipFile(file) as zipped:
        return next((one.filename for one in zipped.infolist() if one.compress_type != zipfile.ZIP_STORED), None)


def _is_plain(name: object, tensor: torch.Tensor) -> bool:
    """True for a dense CPU tensor whose storage has all its elements. A pickle may expand one number to a terabyte."""
    if not isinstance(name, str) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return not tensor.is_quantized and tensor.nbytes <= tensor.untyped_storage().nbytes()


def refused_name(error: pickle.UnpicklingError) -> str | None:
    """Return the name of the object that torch refused to unpickle; None if the file is damaged."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named and named[1]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
