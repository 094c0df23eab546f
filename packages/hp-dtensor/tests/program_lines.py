"""Templates of the lines that `program_grammar` draws: expressions over ``x`` and ``y``, and statements.

``d`` is a dim; ``start``, ``length`` and ``at`` lie in it, ``order`` is a list of its indices, ``k`` is
between 1 and its size. Templates of a table are parted by `` | ``.

A line that registers a hook reads ``grad_fn`` first: of a view whose source was written, torch gives ``register_hook`` no
graph and crashes.
"""

# ruff: noqa: E501
from __future__ import annotations


def _split(table: str) -> list[str]:
    return [part.strip() for line in table.strip().splitlines() for part in line.split(" | ")]


UNARY = _split("""
    torch.tanh({x}) | F.relu({x}) | F.silu({x}) | F.gelu({x}) | torch.sigmoid({x}) | {x} * 0.5 + 1 | {x}.pow(2)
    torch.exp({x} * 0.1) | {x}.abs() | torch.clamp({x}, -0.5, 0.5) | -{x} | torch.where({x} > 0, {x}, {x} * 0.1)
    {x}.detach() | {x}.detach() + {x} | {x}.clone() | {x}.contiguous() | {x} / 2 | 1 - {x} | {x}.sum() | {x}.mean()
    {x}.square().sum() | {x}[None] | {x}[..., None] | {x}.reshape(-1) | {x}.double() + 1 | {x}.max() | {x}.norm()
    {x}.masked_fill({x} > 0.3, 0.25) | torch.addcmul({x}, {x}, {x}, value=0.5) | torch.sin({x})
    torch.logical_or({x} > 0.2, {x} < -0.4) * {x} | {x}.requires_grad_({x}.requires_grad) * 1
    {x} + torch.ones_like({x}) | {x} * torch.full_like({x}, 0.5) | Cubed.apply({x}) | ({x}.detach() * 4).round().float() + {x}
    ({x} * 2).long().double() + {x} | ({x} > 0.1).any().double() * {x} | torch.complex({x}, {x} * 0.5).abs()
    torch.view_as_real(torch.complex({x}, {x} * 0.5)) | torch.polar({x}, {x}).real | {x} * {x}.sum()
    {x}.sum() + {x}.max() | {x} * {x}.detach().max().item() | F.hardtanh({x}) | F.leaky_relu({x}, 0.2) | F.elu({x})
    F.dropout({x}, 0.0) | {x}.mul(2, ).neg() | torch.nan_to_num({x}) | {x}.to(torch.float64) * 2 | {x}.rsub(1)
    copy.deepcopy({x}.detach()) + 1 | {x}.detach().requires_grad_() * 2
    {x}.detach().requires_grad_().requires_grad_(False) | torch.no_grad()(lambda a: a * 2)({x})
    {x}[{x} > 0.1].sum() | {x}.numel() * {x} | {x}.masked_select({x} > 0).square().sum()
    {x}.clone().unsqueeze_(0) | {x}.squeeze() | {x}.unflatten(-1, (1, -1)) if {x}.dim() else {x}[None]
    torch.atleast_2d({x}) | {x}.aminmax()[0] | torch.std_mean({x}, correction=0)[0] | {x}.count_nonzero().double()
    {x}.new_ones({x}.shape) * {x} | {x}.float().double().detach() * 0 + {x} | torch._foreach_mul([{x}], 0.5)[0]
    torch._foreach_exp([{x} * 0.1])[0] | {x}.square().mean().sqrt() * {x}
    torch.mul({x}.detach(), 2, out=torch.zeros_like({x}).detach()) | {x} / {x}.abs().amax().add(1)
    torch.triu({x}) if {x}.dim() > 1 else {x} * 2 | F.softplus({x}) | F.logsigmoid({x}) | {x}.clamp_min(0.1)
    torch.erf({x}) | {x}.sign() * {x} | F.threshold({x}, 0.1, 0.0) | {x}.frac() + {x} | torch.special.expit({x})
    {x}.ravel() | {x}.numpy(force=True).sum() * {x} | len({x}.shape) * {x} | {x}.tile((2,))
    {x}.mean().expand(2, 3) * 1
""")
ALONG = _split("""
    torch.softmax({x}, {d}) | F.log_softmax({x}, {d}) | {x}.sum({d}) | {x}.mean({d}, keepdim=True)
    {x}.cumsum({d}) * 0.3 | {x}.amax({d}) | {x}.flip({d}) | {x}.roll(1, {d}) | untied({x}).sort({d})[0]
    untied({x}).topk({k}, {d})[0] | {x}.std({d}, unbiased=False) | {x}.var({d}, keepdim=True, unbiased=False)
    {x}.logsumexp({d}) | {x}.norm(dim={d}) | F.normalize({x}, dim={d}) | untied({x}).max({d})[0]
    untied({x}).argmax({d}).double() | {x}.unsqueeze({d}) | {x}.squeeze({d}) | {x}.select({d}, {at})
    {x}.narrow({d}, {start}, {length}) | {x}.chunk(2, {d})[0] | {x}.chunk(2, {d})[-1] | {x}.split({k}, {d})[0]
    {x}.unbind({d})[{at}] | {x}.index_select({d}, torch.tensor({order})) | {x}.movedim({d}, {other})
    {x}.transpose({d}, {other}) | {x}.gather({d}, untied({x}).argsort({d})) | {x}.repeat_interleave(2, {d})
    torch.cat({x}.chunk(2, {d})[::-1], {d}) | torch.stack({x}.unbind({d})[::-1], {d})
    {x}.tril() if {x}.dim() > 1 else {x}.cumprod(0) | {x}[{at}] if {x}.shape[0] == {x}.shape[{d}] else {x}[0]
    {x}[..., ::2] | {x}[{order}] if {d} == 0 else {x} * 1 | {x}.diagonal() if {x}.dim() > 1 else {x}.flip(0)
    {x}.unfold({d}, {k}, 1).sum(-1) | {x}.sum({d}, keepdim=True) * {x} | {x} - {x}.mean({d}, keepdim=True)
    {x}.scatter_add({d}, torch.zeros({x}.shape, dtype=torch.int64), {x})
    {x}.index_fill({d}, torch.tensor([{start}]), 0.5)
    {x}.index_add({d}, torch.tensor([{start}]), {x}.narrow({d}, {start}, 1)) | F.glu(torch.cat([{x}, {x}], {d}), {d})
    torch.take_along_dim({x}, untied({x}).argsort({d}), {d})
    {x}.index_copy({d}, torch.tensor([{start}]), {x}.narrow({d}, 0, 1)) | {x}.prod({d}) | untied({x}).median({d})[0]
    untied({x}).cummax({d})[0] |  | {x}.logcumsumexp({d}) | {x}.diff(dim={d}) | {x}.cumsum({d}).flip({d})
    torch.cat([{x}, {x}.narrow({d}, 0, 0)], {d}) | {x}.narrow({d}, {start}, 0).sum({d})
    torch.tensor_split({x}, 3, {d})[0].sum() | {x}.scatter({d}, untied({x}).argsort({d}), {x})
    {x}.scatter({d}, torch.zeros_like({x}).long().narrow({d}, 0, 1), 0.5)
    {x}.scatter_reduce({d}, torch.zeros({x}.shape, dtype=torch.int64), {x}, 'amax')
    {x}.scatter_reduce({d}, torch.zeros({x}.shape, dtype=torch.int64), {x}, 'mean')
    torch.var_mean({x}, {d}, correction=0)[1] | untied({x}).kthvalue({k}, {d})[0] | ({x} > 0).sum({d}).double()
    ({x} > 0).any({d}).double() | ({x} > -0.5).all({d}).double() | untied({x}).argsort({d}).double()
    untied({x}).cummin({d})[0] | {x}.cumprod({d}) | torch.trapezoid({x}, dim={d}) | {x}.aminmax(dim={d})[1]
    {x}.softmax({d}) * {x} | F.gumbel_softmax({x} * 0, hard=False, dim={d}) * 0 + {x} | torch.renorm({x}, 2, {d}, 1.0)
    {x}.nanmean({d}) | {x}.quantile(0.3, {d}) | torch.linalg.vector_norm({x}, 3, {d})
    {x}.sum(({d},), keepdim=True).expand({x}.shape) | sum({x}.unbind({d})) | sum(row.square() for row in {x})
    {x}.split({k}, {d})[-1] * 2 | {x}.index_select({d}, torch.tensor([{start}, {start}]))
    {x}[None].expand(2, *{x}.shape)[1] | {x}.hsplit({x}.shape[1 if {x}.dim() > 1 else 0])[0] * 1
    {x}.swapdims({d}, {other}).contiguous() | F.softmin({x}, {d}) | {x}.rot90() if {x}.dim() > 1 else {x}.flip(0)
    {x}[torch.tensor({order})] if {d} == 0 else {x} * 1 | {x}[..., torch.tensor({order})] if {d} == -1 else {x} + 1
    {x}[:, None] * {x}[None] | {x}[..., -1:] * {x}
    {x}[{x}.sum(tuple(range(1, {x}.dim()))) > 0].sum(0) if {x}.dim() > 1 else {x} * 1
    F.one_hot(torch.tensor({order}), {x}.shape[{d}]).double() @ {x}.movedim({d}, 0) if {x}.dim() == 2 else {x} * 1
    torch.stack([{x}, {x} * 2], {d}).sum({d}) | torch.block_diag({x}, {x}) if {x}.dim() == 2 else {x} * 3
    {x}.index_put((torch.tensor([0, 0]),), {x}[:1], accumulate=True)
    {x}.index_put((torch.tensor([{start}]),), torch.tensor(0.5, dtype=torch.float64)) if {d} == 0 else {x} * 1
    {x}.select_scatter({x}.select({d}, {at}) * 2, {d}, {at})
    {x}.slice_scatter({x}.narrow({d}, {start}, 1) * 3, {d}, {start}, {start} + 1) | {x}.masked_scatter({x} > 0, {x})
    {x}.take(torch.tensor([0, -1]))
    F.avg_pool1d({x}[None], 1)[0] if {x}.dim() == 2 else {x} * 1 | F.pad({x}, (1, 0)) | F.pad({x}, (0, 1), value=0.5)
    F.pad({x}[None], (1, 1), 'replicate')[0] if {x}.dim() in (2, 3) else {x} * 1
    F.max_pool1d(untied({x})[None], {x}.shape[-1])[0] if {x}.dim() == 2 else {x} * 1
""")
BINARY = _split("""
    {x} + {y} | {x} - {y} | {x} * {y} | {y} * {x} | torch.sub({x}, {y}, alpha=0.5) | torch.maximum({x}, {y})
    torch.where({x} > {y}, {x}, {y}) | torch.lerp({x}, {y}, 0.3) | {x} / (1 + {y}.abs())
    torch.atan2({x}, 1.5 + {y}.abs()) | torch.hypot({x}, 0.5 + {y}.abs()) | torch.broadcast_tensors({x}, {y})[0] * 2
    ({x} > {y}).double() + {x} | torch.add({x}, {y}) | mixed({x}, {y}) | torch.where({x} > 0.1, {x}, {y})
    torch.where({y} > 0, {y}, 0.5) | {x} * {y}.detach() | torch.logaddexp({x}, {y}) | torch.fmax({x}, {y})
    {x}.mul({y}).add({x}) | torch.complex({x} * torch.ones_like({y}), {y} * torch.ones_like({x})).abs()
    torch.clamp({x}, {y}, {y} + 1) | ({x} - {y}).abs().sqrt() | torch.copysign({x}, {y}.detach()) | {x} * {y}.sum()
    torch.stack(torch.broadcast_tensors({x}, {y})).sum(0) | {x} + ({y}.detach() * 4).round().float() | {x} * ({y} > 0)
    {x} - {y}.mean() | torch.logical_xor({x} > 0, {y} > 0).double() | {x}.add({y}, alpha=2)
    torch.add({x}.detach(), {y}.detach(), out=torch.zeros_like({x} + {y}).detach()) | {x} ** 2 / (1 + {y} ** 2)
    {x} * torch.ones({y}.shape, dtype=torch.float64) | torch.rsub({x}, {y}) | torch.heaviside({x}, {y}) * {x}
""")
LIKE = _split("""
    torch.cat([{x}, {y}], {d}) | torch.stack([{x}, {y}]) | torch.stack([{x}, {y}], {d}).mean({d}) | ({x} * {y}).sum()
    F.mse_loss({x}, {y}) | torch.addcmul({x}, {y}, {y}, value=0.5) | F.l1_loss({x}, {y}, reduction='none')
    torch.cat([{x}, {y}, {x}], {d}) | F.cosine_similarity({x}, {y}, {d}) | F.softplus({x} - {y})
    torch.vstack([{x}, {y}]) | torch.hstack([{x}, {y}]) | torch.dstack([{x}, {y}]) | F.smooth_l1_loss({x}, {y})
    F.huber_loss({x}, {y}, reduction='sum') | F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())
    F.kl_div(F.log_softmax({x}, {d}), F.softmax({y}, {d}), reduction='batchmean')
    torch.where({x} > {y}, {x}, {y}.detach()) | torch._foreach_add([{x}, {y}], [{y}, {x}])[1]
    torch.dot({x}.flatten(), {y}.flatten()) | {x}.masked_fill({y} > 0, 0.0)
    {x}.gather({d}, untied({y}).argsort({d})) | {x}.scatter_add({d}, untied({y}).argsort({d}), {y})
    {x}.index_add({d}, torch.zeros({x}.shape[{d}], dtype=torch.int64), {y})
    {x}.index_copy({d}, torch.arange({x}.shape[{d}]), {y}) | torch.kron({x} * 1, {y} * 1) if {x}.numel() < 12 else {x} * 1
    torch.tensordot({x}, {y}, {x}.dim()) | torch.cross({x}, {y}, dim={d}) if {x}.shape[{d}] == 3 else {x} - {y}
    torch.cdist({x}, {y} + 9) if {x}.dim() == 2 else {x} * 1
    torch.cat([{x}, {y}.detach()], {d}).std({d}, unbiased=False)
    F.bilinear({x}, {y}, torch.ones(2, {x}.shape[-1], {x}.shape[-1], dtype=torch.float64)) if {x}.dim() > 1 else {x} * 1
    torch.addcdiv({x}, {y}, 1 + {x}.abs()) | {x}.copysign({y}) | F.pairwise_distance({x}, {y} + 9)
    torch.cat((({x}), {y} * 2, {x}.narrow({d}, 0, 1)), {d})
""")
IN_PLACE = _split("""
    {x}.mul_(0.5) | {x}.add_({y}) | {x}.tanh_() | {x}.copy_({y}) | {x}.zero_() | {x}.masked_fill_({x} > 0.3, 0.25)
    {x}.add_(1) | {x}.fill_(0.3) | {x}.clamp_(-0.4, 0.4) | {x}.sub_({y}, alpha=0.5) | {x} += {y} | {x} *= 0.7
    {x}.addcmul_({y}, {y}, value=0.1) | {x}.neg_() | {x}.lerp_({y}, 0.5) | {x}.view(-1).mul_(0.6)
    {x}.reshape(-1).add_(0.1) | {x}.flatten().mul_(0.9) | {x}[...] = {y} | {x}.detach().mul_(0.8) | {x}.data.add_(0.1)
    {x}.t().mul_(0.5) if {x}.dim() <= 2 else {x}.transpose(0, 1).mul_(0.5) | {x}.squeeze().mul_(0.5)
    {x}.masked_fill_({y} > 0, 0.1) | {x}.masked_scatter_({x} > 0, {y}) | {x}.relu_() | F.relu({x}, inplace=True)
    {x}.clamp_min_(-0.2) | {x}.sigmoid_() | {x}.div_(2) | {x}.addcdiv_({y}, 1 + {y}.abs()) | {x}.pow_(2)
    {x}.mul_({y}) | {x}[{x} > 0.2] = 0.1 | {x}[{y} > 0] *= 0.5 | torch._foreach_mul_([{x}], 0.9)
    torch._foreach_add_([{x}, {y}.detach().clone()], 0.1) | {x}.requires_grad_({x}.requires_grad)
    {x}.detach().copy_({y}) | scaled_locally({x}) | with torch.no_grad(): {x}.add_({y}, alpha=0.1)
    {x}.real.mul_(0.9) | {x}[None].mul_(0.9) | {x}.unsqueeze(-1).add_(0.1) | {x}.view_as({x}).mul_(0.7)
    torch.mul({x}, 0.5, out={x}) | {x}.erf_() | {x}.where({x} > 0, {y}).mul_(2)
    {x}.expand({x}.shape).mul_(0.9)
    {x}.ravel().mul_(0.9) | {x}.unflatten(-1, (1, -1)).mul_(0.9) if {x}.dim() else {x}.neg_()
    {x}.mT.mul_(0.9) if {x}.dim() > 1 else {x}.neg_() | {x}.data = {y}.detach() * 1
    {x}.copy_({y}.float().double().detach() * 0)
""")
IN_PLACE_PART = _split("""
    {row} = 0.5 | {row} *= 0.5 | {part} += 1 | {part} = 0.25 | {part} *= {part}
    {x}.narrow({d}, {start}, {length}).mul_(0.5) | {x}.select({d}, {start}).add_(0.3) | {x}.chunk(2, {d})[0].mul_(0.4)
    {x}.unbind({d})[{start}].zero_() | {x}.split({length}, {d})[0].tanh_()
    {x}.index_fill_({d}, torch.tensor([{start}]), 0.2) | {part}.mul_(2.0) | {part}.copy_({part} * 0.5)
    {x}.diagonal().mul_(0.5) if {x}.dim() > 1 else {x}.neg_() | {x}.transpose({d}, -1).mul_(0.9)
    {x}.movedim({d}, 0)[{start}].mul_(0.9) |  | {part} = {part} * 2 | {part} -= {part}.mean()
    {x}.index_add_({d}, torch.tensor([{start}]), {x}.narrow({d}, {start}, 1).clone())
    {x}.index_copy_({d}, torch.tensor([{start}]), {x}.narrow({d}, 0, 1).clone())
    {x}.scatter_({d}, torch.zeros({x}.shape, dtype=torch.int64), 0.5)
    {x}.scatter_add_({d}, torch.zeros({x}.shape, dtype=torch.int64), {x}.clone())
    {x}.index_put_((torch.tensor([0, 0]),), {x}[:1].clone(), accumulate=True)
    {x}.put_(torch.tensor([0]), torch.tensor([0.5], dtype=torch.float64)) | {x}[[{start}]] = 0.3
    {x}[torch.tensor([0, -1])] *= 0.5 | {x}[..., 0] = {x}[..., -1] | {x}[..., 0].add_({x}[..., -1].clone())
    {x}.tril_() if {x}.dim() > 1 else {x}.cumsum_(0) | {x}.fill_diagonal_(0.2) if {x}.dim() == 2 else {x}.neg_()
    {x}.cumsum_({d}) | {x}.swapdims({d}, 0).select(0, 0).fill_(0.4) | {x}[::2] *= 0.5 | {x}[..., ::2].neg_()
    {x}[-1:].zero_() | {x}.narrow({d}, {start}, {length}).narrow({d}, 0, 1).fill_(0.2)
    {x}.chunk(2, {d})[-1].copy_({x}.chunk(2, {d})[-1] * 2) | {x}.unfold({d}, 1, 1).mul_(0.9)
    {x}.tensor_split(2, {d})[0].neg_() | {x}.narrow({d}, {start}, 0).fill_(3.0)
    {x}.unbind({d})[0].copy_({x}.unbind({d})[-1]) | torch._foreach_mul_([{part}], 0.5)
    {x}[None, ..., None].select(1, 0).mul_(0.7) | {x}.narrow({d}, {start}, {length}).copy_({part}.detach() * 3)
    {row}.add_({row}.detach().clone()) | {x}.select({d}, {start})[...] = 0.7 | {part}.view_as({part}).neg_()
    {part}.detach().mul_(0.9)
""")
WRITTEN_LEAF = _split("""
    with torch.no_grad(): {x}.mul_(0.9) | {x}.data.mul_(0.9) | {x}.data = {x}.data * 0.9 | {x}.detach().add_(0.05)
    with torch.no_grad(): {x}.copy_({x} * 0.8) | with torch.no_grad(): {x}.view(-1).mul_(0.9)
    with torch.no_grad(): {x}[...] = {x} * 0.7 |  | with torch.no_grad(): {x}[:1] = 0.3
    with torch.no_grad(): {x}.narrow(-1, 0, 1).add_(0.2) | scaled_locally({x})
    with torch.no_grad(): {x}.clamp_(-0.8, 0.8) | with torch.no_grad(): torch._foreach_mul_([{x}], 0.9)
    with torch.no_grad(): {x}.chunk(2)[-1].zero_() | with torch.no_grad(): {x}.sub_({x}.grad, alpha=0.1)
    {x}.grad.mul_(0.5) | {x}.grad.zero_() | {x}.grad = None | with torch.no_grad(): {x}.t().mul_(0.9)
    with torch.no_grad(): {x}.copy_({x}.detach().flip(0))
""")
WATCHED = _split("""
    {x}.grad_fn; {x}.register_hook(lambda g: g * 1.5) | {x}.grad_fn; {x}.register_hook(lambda g: g + 0.1) | {x}.retain_grad()
    {x}.grad_fn; {x}.register_hook(lambda g: None) |  | {x}.grad_fn; {x}.register_hook(lambda g: g * 3).remove()
    {x}.grad_fn; {x}.register_hook(lambda g: g.clamp(-1, 1)) | {x}.grad_fn; {x}.register_hook(lambda g: g * {x}.detach())
    {x}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)) | ({x} * {x}).sum().backward(retain_graph=True)
    {x}.sin().sum().backward(retain_graph=True) | {x}.backward(torch.ones_like({x}), retain_graph=True)
    {x}.sum().backward(retain_graph=True)
""")
NESTED = _split("""
    checkpoint(lambda a, b: torch.tanh(a * b) * a, {x}, {y}, use_reentrant=False)
    checkpoint(lambda a: torch.softmax(a, -1) @ a.mT if a.dim() > 1 else a * a, {x}, use_reentrant=False)
    checkpoint(lambda a: (a * {y}).sin(), {x}, use_reentrant=False)
    torch.autograd.grad(({x} ** 3).sum(), {x}, create_graph=True)[0]
    torch.autograd.grad(({x} * {x} * {y}).sum(), {x}, create_graph=True)[0]
    torch.autograd.grad({x}.tanh(), {x}, {y}.detach())[0]
    checkpoint(lambda a: move(a * 2, {codes}).tanh(), {x}, use_reentrant=False)
    checkpoint(lambda a, b: a.sin() * b, {x}, {y}, use_reentrant=True)
    checkpoint(lambda a: checkpoint(torch.tanh, a * 2, use_reentrant=False) * a, {x}, use_reentrant=False)
    torch.autograd.grad((move({x}, {codes}) ** 3).sum(), {x}, create_graph=True)[0]
    torch.autograd.grad({x}.exp().mul(0.1).sum(), {x})[0] * {x}
    torch.autograd.grad(torch.autograd.grad(({x} ** 4).sum(), {x}, create_graph=True)[0].sum(), {x}, create_graph=True)[0] * 0.1
    torch.autograd.grad([({x} * 2).sum(), {y}.sum() + {x}.sin().sum()], {x}, create_graph=True)[0] * {x}
    torch.autograd.grad({x}.square(), {x}, torch.ones_like({x}), create_graph=True)[0]
    checkpoint(lambda a: (a.sum() * a).cumsum(0) if a.dim() else a * a, {x}, use_reentrant=False)
    torch.autograd.functional.vjp(lambda a: a * a.sin(), {x}, {y}.detach(), create_graph=True)[1]
    torch.autograd.functional.hvp(lambda a: (a ** 3).sum(), {x}, {y}.detach())[1]
    torch.func.grad(lambda a: (a ** 3).sum())({x}) | torch.func.vmap(torch.sin)({x}) if {x}.dim() else {x} * 1
    offloaded(lambda: ({x} * {y}).tanh() * {x})
    torch.autograd.functional.jvp(lambda a: a * a.sin(), {x}.detach(), {y}.detach())[1]
""")
PRODUCT = _split("""
    F.embedding(torch.tensor({targets}) % {x}.shape[0], {x}, padding_idx=0) | torch.mv({x}, {x}[0]) | torch.trace({x})
    torch.addmv({x} @ {x}[0], {x}, {x}[-1], beta=0.5) | torch.linalg.inv({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[0]))
    torch.linalg.det({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[0])) | F.batch_norm({x}, None, None, training=True)
    torch.linalg.solve({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[0]).double(), {x})
    torch.linalg.cholesky({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[0]).double())
    F.cross_entropy({x}, torch.tensor({targets}), ignore_index=0, label_smoothing=0.1)
    F.nll_loss(F.log_softmax({x}, -1), torch.tensor({targets})) | torch.einsum('ij,kj->ik', {x}, {x})
    F.cross_entropy({x}, torch.tensor({targets}), reduction='none') | F.cross_entropy({x}, {x}.softmax(-1))
    torch.einsum('ij->j', {x}) | torch.einsum('ij,ij->', {x}, {x} * 2) | torch.linalg.multi_dot([{x}, {x}.mT, {x}])
    F.conv1d({x}[None], {x}[:, None, :1], groups={x}.shape[0]) | torch.addr({x}, {x}[:, 0], {x}[0])
    F.embedding_bag(torch.tensor([[0, 0]]), {x}, mode='sum') | F.group_norm({x}, 1) | {x}.mT.matmul({x}).diagonal()
""")
"""Of a matrix, and ``targets``, a column for each row."""
PRODUCT_OF_THREE = _split("""
    torch.bmm({x}, {x}.mT) | torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT) | F.group_norm({x}, 1) | {x} @ {x}[0].mT
    F.group_norm({x}, {x}.shape[1]) | F.instance_norm({x}) | F.batch_norm({x}, None, None, training=True)
    F.scaled_dot_product_attention({x}[:, None], {x}[:, None], {x}[:, None], is_causal=True) | {x}[0] @ {x}.mT
    F.conv1d({x}, {x}[:, :, :1]) | F.conv2d({x}[None], {x}[None, :, :1, :1]) | F.avg_pool1d({x}, 1) | {x}.mT @ {x}[:, :, 0:1].mT.mT
    F.interpolate({x}, scale_factor=2) | F.conv_transpose1d({x}, {x}[0].unsqueeze(-1)) | F.max_pool2d(untied({x}), 1)
    torch.einsum('bij,bij->bi', {x}, {x}) | torch.einsum('bij,cij->bc', {x}, {x}) | {x}.flatten(1) @ {x}.flatten(1).T
    F.adaptive_avg_pool1d({x}, 1) | {x}.transpose(0, 1) @ {x}.permute(1, 2, 0) | torch.cdist({x}, {x} + 9)
    {x}.flatten(0, 1).unflatten(0, {x}.shape[:2]) | {x}.unflatten(-1, (1, -1)).transpose(1, 2) | {x}.flatten(1)
""")
PAIRS = _split("""
    {x}.aminmax() | {x}.chunk(2, -1) | torch.std_mean({x}, -1, correction=0) | {x}.split([1, {x}.shape[-1] - 1], -1)
    torch.broadcast_tensors({x}, {x}[:1]) | torch._foreach_mul([{x}, {x}], [0.5, 2.0]) | {x}.tensor_split(2)
    torch.var_mean({x}, 0, correction=0) | {x}.aminmax(dim=0) | torch.frexp({x})[0], {x} * 2
    torch.autograd.grad(({x} * {x}.detach()).sum() + {x}.cos().sum(), {x}, create_graph=True)[0], {x} * 1
    torch.meshgrid({x}.flatten(), {x}.flatten(), indexing='ij') | (lambda a: (a, a.detach()))({x} * 2)
""")
"""Expressions of two values."""
