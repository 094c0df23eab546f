"""The calls of test_ops_match_single_device that multiply, move, index or normalise."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import MOVES, case

A, THIN, DEEP = (5, 7), (4, 1, 3), (3, 4, 6)
sdpa = F.scaled_dot_product_attention


def _products() -> None:
    case("matmul", torch.matmul, (5, 7), (7, 4))
    case("matmul operator", lambda x, y: x @ y, (1, 7), (7, 3))
    case("matmul batch", torch.matmul, (3, 5, 7), (3, 7, 4))
    case("matmul broadcast", torch.matmul, (3, 5, 7), (7, 4))
    case("matmul broadcast one", torch.matmul, (1, 5, 4), (3, 4, 2))
    case("matmul four dims", torch.matmul, (2, 3, 5, 4), (2, 3, 4, 5))
    case("matmul vector", torch.matmul, (5, 7), (7,))
    case("matmul batch vector", torch.matmul, (3, 5, 7), (7,))
    case("vector matmul", torch.matmul, (7,), (7, 4))
    case("vector batch matmul", torch.matmul, (7,), (3, 7, 4))
    case("dot", torch.dot, (7,), (7,))
    case("mm", torch.mm, (5, 2), (2, 4))
    case("bmm", torch.bmm, (2, 5, 3), (2, 3, 4))
    case("mv", torch.mv, (5, 7), (7,))
    case("matmul itself", lambda x: x @ x.t(), (5, 7))
    case("outer", torch.outer, (5,), (7,))
    case("cross", torch.linalg.cross, (5, 3), (5, 3))
    case("cross itself", lambda x: torch.cross(x, x.flip(0), dim=-1), (5, 3))
    case("cross broadcast", lambda x, y: torch.linalg.cross(x, y, dim=1), (5, 3, 1), (1, 3, 4))
    case("cross by position", lambda x, y: x.cross(y, 0), (3, 7), (3, 7))
    # without a dim along the first of size three, of which a part may have another: of (6, 2, 3) on two ranks dim 0
    case("cross first dim of three", _cross_without_dim, (6, 2, 3), (6, 2, 3))
    case("cross no elements", torch.linalg.cross, (0, 3), (0, 3))
    case("addmm", torch.addmm, (5, 4), (5, 7), (7, 4))
    case("addmm row", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (4,), (5, 7), (7, 4))
    case("baddbmm", torch.baddbmm, (2, 5, 4), (2, 5, 3), (2, 3, 4))
    case("linear", F.linear, (5, 7), (4, 7))
    case("linear bias", F.linear, (5, 7), (4, 7), (4,))
    case("linear batch", F.linear, (2, 3, 7), (5, 7), (5,))
    case("linear vector", F.linear, (7,), (5, 7), (5,))
    case("linear keyword", lambda x, w, b: F.linear(x, weight=w, bias=b), (2, 3, 7), (5, 7), (5,))
    case("linear no bias", lambda x, w: F.linear(x, w, None), (2, 3, 7), (5, 7))
    case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 5, 7), (2, 7, 3))
    case("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), (5, 7), (7, 3))
    case("einsum sum", lambda x: torch.einsum("ij->i", x), (5, 7))
    case("einsum diagonal", lambda x: torch.einsum("ii->i", x), (5, 5))
    case("einsum trace", lambda x: torch.einsum("ii", x), (5, 5))
    case("einsum dots", lambda x, y: torch.einsum("...d,de->...e", x, y), (2, 5, 7), (7, 3))
    case("einsum three", lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z), (3, 5), (5, 4), (3, 4))
    case("einsum outer", lambda x, y: torch.einsum("i,j->ij", x, y), (5,), (4,))
    case("einsum list", lambda x, y: torch.einsum("ij,jk->ik", [x, y]), (5, 7), (7, 3))
    case("einsum own term", lambda x, y: torch.einsum("ij,k->k", x, y), (5, 7), (3,))
    case("tensordot", lambda x, y: torch.tensordot(x, y, 1), (5, 7), (7, 3))
    case("kron", torch.kron, (2, 3), (3, 1))
    case("cdist", torch.cdist, (4, 3), (5, 3))


def _cross_without_dim(x: Any, y: Any) -> Any:
    with warnings.catch_warnings():  # torch's own, of the missing dim
        warnings.simplefilter("ignore", UserWarning)
        return torch.cross(x, y)


def _views() -> None:
    case("view split", lambda x: x.view(5, 7, 1), A)
    case("view heads", lambda x: x.view(2, 5, 6, 2), (2, 5, 12))
    case("view -1", lambda x: x.view(2, 5, -1, 2), (2, 5, 12))
    case("view heads uneven", lambda x: x.view(2, 5, 5, 4), (2, 5, 20))
    case("view flat", lambda x: x.view(-1), A)
    case("view merge first", lambda x: x.view(-1, 6), DEEP)
    case("view merge last", lambda x: x.view(3, 24), DEEP)
    case("view mix", lambda x: x.view(6, 12), DEEP)
    case("view tuple", lambda x: x.view((4, 3)), THIN)
    case("view to one", lambda x: x.view(1, 1, 1), (1,))
    case("view scalar", lambda x: x.view(()), (1, 1))
    case("view no elements", lambda x: x.view(0, 6), (0, 2, 3))
    case("reshape", lambda x: x.reshape(7, 5), A)
    case("reshape back", lambda x: x.reshape(12, 6).reshape(3, 4, 6) * 2, DEEP)
    case("reshape transposed", lambda x: x.transpose(0, 1).reshape(2, 2, 18), DEEP)
    case("merge heads", lambda x: x.transpose(1, 2).reshape(2, 5, 12), (2, 6, 5, 2))
    case("split heads", lambda x: x.view(2, 5, -1, 3).transpose(1, 2), (2, 5, 12))
    case("flatten", torch.flatten, DEEP)
    case("flatten some", lambda x: x.flatten(0, 1), DEEP)
    case("flatten last", lambda x: x.flatten(-2), DEEP)
    case("flatten scalar", lambda x: x.flatten(), ())
    case("ravel", torch.ravel, THIN)
    case("unflatten", lambda x: x.unflatten(1, (2, 6)), (5, 12))
    case("unflatten -1", lambda x: torch.unflatten(x, -1, (3, -1)), (5, 12))
    case("squeeze", torch.squeeze, THIN)
    case("squeeze dim", lambda x: x.squeeze(1), THIN)
    case("squeeze not one", lambda x: x.squeeze(0), THIN)
    case("squeeze dims", lambda x: x.squeeze((0, 1)), (1, 1, 5))
    case("unsqueeze", lambda x: x.unsqueeze(0), A)
    case("unsqueeze last", lambda x: x.unsqueeze(-1), A)
    case("unsqueeze scalar", lambda x: x.unsqueeze(0), ())
    case("view_as", lambda x, y: x.view_as(y), (6, 2), (3, 4))
    case("reshape_as", lambda x, y: x.reshape_as(y), (6, 2), (3, 4))
    case("t", lambda x: x.t(), A)
    case("T", lambda x: x.T, A)
    case("mT", lambda x: x.mT, DEEP)
    case("transpose", lambda x: x.transpose(0, -1), DEEP)
    case("torch.transpose", lambda x: torch.transpose(x, 1, 2), DEEP)
    case("swapaxes", lambda x: x.swapaxes(0, 1), DEEP)
    case("permute", lambda x: x.permute(2, 0, 1), DEEP)
    case("permute tuple", lambda x: torch.permute(x, (1, 2, 0)), DEEP)
    case("permute dims keyword", lambda x: x.permute(dims=(1, 0, 2)), DEEP)
    case("movedim", lambda x: x.movedim(0, -1), DEEP)
    case("movedim tuple", lambda x: torch.movedim(x, (0, 1), (2, 0)), DEEP)
    case("expand", lambda x: x.expand(4, 5, 3), THIN)
    case("expand -1", lambda x: x.expand(2, -1, 5, -1), THIN)
    case("expand more", lambda x: x.expand(3, 5), (5,))
    case("expand scalar", lambda x: x.expand(3, 2), ())
    case("expand_as", lambda x, y: x.expand_as(y), (1, 7), A)
    case("broadcast_to", lambda x: torch.broadcast_to(x, (5, 7)), (7,))
    case("repeat kv", lambda x: x[:, :, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4), (2, 3, 5, 4))
    case("contiguous transposed", lambda x: x.t().contiguous(), A)
    case("repeat", lambda x: x.repeat(2, 1), A)
    case("repeat more", lambda x: x.repeat(2, 1, 2), A)
    case("tile", lambda x: torch.tile(x, (2,)), A)
    case("repeat_interleave", lambda x: x.repeat_interleave(2, dim=1), A)
    case("repeat_interleave flat", lambda x: torch.repeat_interleave(x, 2), A)
    case("flip", lambda x: x.flip(0), A)
    case("flip two", lambda x: torch.flip(x, (0, 1)), A)
    case("roll", lambda x: x.roll(2, 0), A)
    case("roll flat", lambda x: torch.roll(x, 3), A)
    case("roll two", lambda x: torch.roll(x, shifts=(1, 2), dims=(0, 1)), A)
    case("tril", torch.tril, A)
    case("triu", lambda x: x.triu(1), DEEP)
    case("diagonal", lambda x: x.diagonal(), A)
    case("diag", torch.diag, A)
    case("trace", torch.trace, (5, 5))
    case("meshed add", lambda x: x.view(-1) + x.reshape(-1), A)
    case("real", torch.real, A)
    case("detach", lambda x: x.detach() * 2, A)


def _parts() -> None:
    case("cat", lambda x, y: torch.cat([x, y]), A, A)
    case("cat dim", lambda x, y: torch.cat((x, y), dim=1), A, (5, 3))
    case("cat negative", lambda x, y: torch.cat([x, y], -1), A, (5, 2))
    case("cat empty", lambda x, y: torch.cat([x, y], -2), (0,), (2, 3, 5, 4), only="replicate shard partial")
    case("cat three", lambda x, y, z: torch.cat([x, y, z], 0), (2, 3), (1, 3), (4, 3))
    case("rotate half", lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1), DEEP)
    case("stack", lambda x, y: torch.stack([x, y]), A, A)
    case("stack last", lambda x, y: torch.stack((x, y), dim=-1), A, A)
    case("hstack", lambda x, y: torch.hstack([x, y]), A, A)
    case("split", lambda x: x.split(3), A)
    case("split dim", lambda x: torch.split(x, 4, dim=-1), A)
    case("split sizes", lambda x: x.split([1, 4, 2], dim=1), A)
    case("chunk", lambda x: x.chunk(3), A)
    case("chunk dim", lambda x: torch.chunk(x, 2, dim=1), A)
    case("tensor_split", lambda x: torch.tensor_split(x, 3, dim=1), A)
    case("unbind", lambda x: x.unbind(0), A)
    case("unbind last", lambda x: torch.unbind(x, -1), THIN)
    case("iterate", lambda x: tuple(x), THIN)
    case("narrow", lambda x: x.narrow(1, 2, 3), A)
    case("select", lambda x: x.select(0, 2), A)
    case("select last", lambda x: torch.select(x, -1, 1), THIN)
    case("index int", lambda x: x[2], A)
    case("index negative", lambda x: x[-1], A)
    case("index slice", lambda x: x[1:4], A)
    case("index step", lambda x: x[:, ::2], A)
    case("index full", lambda x: x[:], A)
    case("index past the end", lambda x: x[:, :100], A)
    case("index none", lambda x: x[None, :, None], A)
    case("index dots", lambda x: x[..., 0], DEEP)
    case("index dots slice", lambda x: x[..., 1:, :], DEEP)
    case("index mix", lambda x: x[0, :, None, 2:4], DEEP)
    case("index last token", lambda x: x[:, -1, :], DEEP)
    case("index list", lambda x: x[[0, 2, 1]], A)
    case("index pair of lists", lambda x: x[[0, 1], [2, 3]], A)
    case("index tensor", lambda x, i: x[i], A, ((3,), "i5"))
    case("index tensors", lambda x, i, j: x[i, j], A, ((4,), "i5"), ((4,), "i7"))
    case("index dim tensor", lambda x, i: x[:, i], A, ((2, 3), "i7"))
    case("index column", lambda x, i: x[i[:, None], 0], A, ((3,), "i5"))
    case("index mask", lambda x, m: x[m], A, (A, "b"))
    case("index row mask", lambda x, m: x[m], A, ((5,), "b"))
    case("index 0-d", lambda x, i: x[i], A, ((), "i5"))
    case("index bool", lambda x: x[True], A)
    case("index one and true", lambda x: (x[1], x[True], x[0], x[False]), A)
    case("fill rows", _fill_rows, A, refuses=MOVES)
    case("index slice tensor", lambda x, i: x[: i + 1], A, ((), "i5"))
    case("index apart", lambda x, i, j: x[i, :, j], DEEP, ((2,), "i3"), ((2,), "i6"))
    case("index int and tensor", lambda x, i: x[0, :, i], DEEP, ((2,), "i6"))
    case("index none tensor", lambda x, i: x[None, ..., i, :], DEEP, ((2, 1), "i4"))
    case("index tensor full slices", lambda x, i: x[:3, i, 0:6], DEEP, ((3,), "i4"))
    case("index dots list", lambda x: x[..., [1, 1]], DEEP)
    case("index none alone", lambda x: x[None], ())
    case("set item", _set, A, (7,))
    case("set item scalar", _set_scalar, A)
    case("index_select", lambda x, i: x.index_select(1, i), A, ((4,), "i7"))
    case("gather", lambda x, i: x.gather(1, i), A, ((5, 3), "i7"))
    case("gather dim 0", lambda x, i: torch.gather(x, 0, i), A, ((2, 7), "i5"))
    case("gather smaller", lambda x, i: torch.gather(x, 1, i), A, ((2, 3), "i7"))
    case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, dim=1), A, ((5, 3), "i7"))
    case("take_along_dim broadcast", lambda x, i: torch.take_along_dim(x, i, dim=1), A, ((1, 3), "i7"))
    case("scatter", lambda x, i, s: x.scatter(1, i, s), A, ((5, 1), "i7"), (5, 1))
    case("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), A, ((3, 7), "i5"), (3, 7))
    case("index_add", lambda x, i, s: x.index_add(0, i, s), A, ((3,), "i5"), (3, 7))
    case("masked_select", torch.masked_select, A, (A, "b"))
    case("one_hot", lambda i: F.one_hot(i, 9), (A, "i9"))
    case("pad last", lambda x: F.pad(x, (1, 2)), A)
    case("pad two", lambda x: F.pad(x, (0, 0, 1, 0)), DEEP)
    case("pad value", lambda x: F.pad(x, (0, 1), value=1.5), A)
    case("pad crop", lambda x: F.pad(x, (-1, 0)), A)
    case("pad mode", lambda x: F.pad(x, (1, 1), mode="reflect"), A)
    case("bucketize", lambda x, y: torch.bucketize(x, y.sort().values), A, (4,))


def _set(x: Any, y: Any) -> Any:
    x = x.clone()
    x[2] = y
    return x


def _fill_rows(x: Any) -> Any:
    x = x.detach().clone()
    x[1].fill_(0.5)
    x[:, 2:4].zero_()
    x[-1, 3].fill_(7.0)
    return x


def _set_scalar(x: Any) -> Any:
    x = x.clone()
    x[:, 1:3] = 2.0
    return x


def _layers() -> None:
    ids = ((4, 6), "i9")
    for name in ("softmax", "log_softmax", "softmin"):
        case(name, lambda x, f=getattr(F, name): f(x, dim=-1), A)
        case(f"{name} first", lambda x, f=getattr(F, name): f(x, dim=0), A)
    case("softmax method", lambda x: x.softmax(1), A)
    case("softmax dtype", lambda x: F.softmax(x.float(), dim=-1, dtype=torch.float64), (A, "i9"))
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (7,), w, b), (4, 5, 7), (7,), (7,))
    case("layer_norm two dims", lambda x, w, b: F.layer_norm(x, (5, 7), w, b), (4, 5, 7), (5, 7), (5, 7))
    case("layer_norm plain", lambda x: F.layer_norm(x, (7,)), A)
    case("layer_norm bias only", lambda x, b: F.layer_norm(x, (7,), None, b), A, (7,))
    case("rms_norm", lambda x, w: F.rms_norm(x, (7,), w, 1e-6), (4, 5, 7), (7,))
    case(
        "rms_norm by hand", lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (4, 5, 7), (7,)
    )
    case("group_norm", lambda x: F.group_norm(x, 2), (3, 4, 5))
    case("normalize", lambda x: F.normalize(x, dim=-1), A)
    case("normalize default dim", lambda x: F.normalize(x), A)
    case("glu", lambda x: F.glu(x, dim=-1), (5, 6))
    case("glu default dim", F.glu, (5, 6))
    case("embedding", F.embedding, ids, (9, 5))
    case("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=2), ids, (9, 5))
    case("embedding padding negative", lambda i, w: F.embedding(i, w, padding_idx=-1), ids, (9, 5))
    case("embedding small", F.embedding, ((4,), "i2"), (2, 1))
    case("embedding flat", F.embedding, ((), "i9"), (9, 5))
    for reduction in ("mean", "sum", "none"):
        case(
            f"cross_entropy {reduction}",
            lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
            (5, 7),
            ((5,), "i7"),
        )
        case(
            f"cross_entropy ignored {reduction}",
            lambda x, t, r=reduction: F.cross_entropy(x, t, ignore_index=2, reduction=r),
            (6, 3),
            ((6,), "i3"),
        )
        case(
            f"cross_entropy weight {reduction}",
            lambda x, t, w, r=reduction: F.cross_entropy(x, t, w.detach(), ignore_index=1, reduction=r),
            (6, 3),
            ((6,), "i3"),
            ((3,), "p"),
        )
        case(
            f"nll_loss {reduction}",
            lambda x, t, r=reduction: F.nll_loss(x.log_softmax(-1), t, reduction=r),
            (5, 7),
            ((5,), "i7"),
        )
        for loss in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            case(
                f"{loss} {reduction}",
                lambda x, t, f=getattr(F, loss), r=reduction: f(x, t, reduction=r),
                A,
                A,
            )
        if reduction != "mean":  # torch warns of that one
            case(
                f"kl_div {reduction}",
                lambda x, t, r=reduction: F.kl_div(x, t, reduction=r),
                A,
                (A, "p"),
            )
    case("cross_entropy 3 dims", F.cross_entropy, (2, 5, 3), ((2, 3), "i5"))
    case("cross_entropy 1 dim", F.cross_entropy, (5,), ((), "i5"))
    case("cross_entropy probabilities", F.cross_entropy, (5, 7), ((5, 7), "p"))
    case("cross_entropy smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (5, 7), ((5,), "i7"))
    case(
        "cross_entropy smoothing sum",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="sum"),
        (5, 7),
        ((5,), "i7"),
    )
    case(
        "cross_entropy smoothing ignored",
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, label_smoothing=0.1),
        (6, 3),
        ((6,), "i3"),
    )
    case(
        "cross_entropy smoothing weight",
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.1),
        (6, 3),
        ((6,), "i3"),
        ((3,), "p"),
    )
    case(
        "cross_entropy keyword weight",
        lambda x, t, w: F.cross_entropy(input=x, target=t, weight=w.detach()),
        (6, 3),
        ((6,), "i3"),
        ((3,), "p"),
    )
    case(
        "cross_entropy shifted",
        lambda x, t: F.cross_entropy(x[..., :-1, :].reshape(-1, 5), t[..., 1:].reshape(-1), ignore_index=-100),
        (2, 4, 5),
        ((2, 4), "i5"),
    )
    # ---- attention ----
    q, kv = (2, 6, 5, 4), (2, 3, 5, 4)
    case("sdpa", sdpa, q, q, q)
    case("sdpa causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, q, q)
    case("sdpa scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), q, q, q)
    case("sdpa grouped", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), q, kv, kv)
    case("sdpa grouped one", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, (2, 1, 5, 4), (2, 1, 5, 4))
    case("sdpa three dims", sdpa, (6, 5, 4), (6, 5, 4), (6, 5, 4))
    case("sdpa two dims", sdpa, (5, 4), (5, 4), (5, 4))
    case("sdpa other length", sdpa, (2, 4, 1, 4), (2, 4, 7, 4), (2, 4, 7, 3))
    case("sdpa mask", lambda q, k, v, m: sdpa(q, k, v, m), q, q, q, (2, 1, 5, 5))
    case(
        "sdpa bool mask",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m | torch.eye(5, dtype=torch.bool).any()),
        q,
        q,
        q,
        ((5, 5), "b"),
    )
    case("sdpa heads of one", sdpa, (2, 1, 5, 4), (2, 1, 5, 4), (2, 1, 5, 4))
    case("sdpa by keyword", lambda q, k, v: sdpa(query=q, key=k, value=v), (6, 5, 4), (6, 5, 4), (6, 5, 4))
    case("attention by hand", _attend, (2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 4))
    case("mlp", lambda x, u, d: F.linear(F.silu(F.linear(x, u)), d), (2, 3, 4), (7, 4), (4, 7))


def _attend(q: Any, k: Any, v: Any) -> Any:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5, dim=-1), v)


_products()
_views()
_parts()
_layers()
