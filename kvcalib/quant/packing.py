"""Codes <-> bytes: a little-endian bit stream, 1 to 8 bits per code and not one bit of padding inside.

Eight codes of b bits fill exactly b bytes. Code i of the eight occupies bits i*b .. i*b + b - 1 of the stream, and
bit j of the stream is bit j % 8 of byte j // 8. Three bits, codes a..h:

    byte 0: c c b b b a a a      byte 1: f e e e d d d c      byte 2: h h h g g g f f
            1 0 2 1 0 2 1 0              0 2 1 0 2 1 0 2              2 1 0 2 1 0 2 1
"""

import torch


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes take; a last incomplete group of eight is filled with zeros."""
    return -(-count // 8) * bits


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., n] below 2**bits -> uint8 [..., packed_bytes(n, bits)]."""
    count = codes.shape[-1]
    if bits == 8 and count % 8 == 0:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, -count % 8))
    groups = padded.unflatten(-1, (-1, 8)).long()
    shifts = torch.arange(0, 8 * bits, bits, device=codes.device)
    words = (groups << shifts).sum(-1, keepdim=True)
    byte_shifts = torch.arange(0, 8 * bits, 8, device=codes.device)
    return ((words >> byte_shifts) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack`: uint8 [..., bytes] -> uint8 codes [..., count]."""
    groups = data.unflatten(-1, (-1, bits)).long()
    byte_shifts = torch.arange(0, 8 * bits, 8, device=data.device)
    words = (groups << byte_shifts).sum(-1, keepdim=True)
    shifts = torch.arange(0, 8 * bits, bits, device=data.device)
    codes = ((words >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return codes[..., :count]
