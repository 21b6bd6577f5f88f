"""One hash for everything in an artifact that decides how a token is stored and read back."""

import hashlib
import json

from kvcalib.artifact.schema import Artifact


def fingerprint(artifact: Artifact) -> str:
    """sha256 over the format and all tables; the same before and after a trip through a file."""
    digest = hashlib.sha256(json.dumps(artifact.spec.to_dict(), sort_keys=True).encode())
    for index, layer in sorted(artifact.layers.items()):
        for tables in (layer.key, layer.value):
            for name, tensor in tables._asdict().items():
                if tensor is not None:
                    digest.update(f"{index}.{name}{list(tensor.shape)}".encode())
                    digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
