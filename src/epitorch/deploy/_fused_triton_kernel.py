"""The fused stage's middle as a Triton kernel; import it where triton is there only.

A lane owns one wrapped channel of one tile of TILE_Y x TILE_X output pixels and walks over the expanded channels
whose lower tap is that wrapped channel ("layers", `indices` and `constants`). Nothing that has the width of the
expanded tensor leaves the registers: the kernel reads the product map and writes the wrapped sums.

What decides its speed on a GPU of the H100's kind, where arithmetic is nearer to the limit than memory is:

* Lanes beside each other are channels beside each other. Both shifts are shifts on a circle, so a warp's loads and
  stores are contiguous runs, and lanes are numbered through tiles: no channel count is rounded up to a power of two.
* Each layer reads its patch of the product map again, shifted differently; those reads hit the first-level cache.
* The pixels of a tile are unrolled into registers, so an expanded value is computed once per tile and serves the
  whole depthwise window: (TILE_Y + 2)(TILE_X + 2) of them for TILE_Y * TILE_X outputs at stride 1 with a 3x3 kernel.
* Upper taps of the wrapping go to the channel GROUP further on, another lane: they are summed apart, and moved
  across lanes once, after the last layer.
"""

# triton reads annotations as types of its own, so only compile-time constants have any
# mypy: disable-error-code="no-untyped-def, assignment"
import triton
import triton.language as tl


@triton.jit
def _activate(x, CODE: tl.constexpr):  # CODE: place in ACTIVATIONS
    if CODE == 1:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif CODE == 2:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif CODE == 3:
        x = x / (1.0 + tl.exp(-x))
    elif CODE == 4:
        y = tl.maximum(x + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * tl.minimum(y, 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
    return x


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr):
    values = (tl.full((BLOCK,), 0.0, tl.float32),)
    for _ in tl.static_range(1, COUNT):
        values = values + (tl.full((BLOCK,), 0.0, tl.float32),)  # noqa: RUF005 - triton has no star
    return values


@triton.jit
def _place(tiles, SIZE: tl.constexpr, UPPER_OUT: tl.constexpr, BLOCK: tl.constexpr):
    """Wrapped channel and tile of every lane, and whether it has work."""
    lane = tl.arange(0, BLOCK)
    if UPPER_OUT:  # sums move between the lanes of a tile, so tiles stay whole
        WHOLE: tl.constexpr = BLOCK // SIZE
        tile = tl.program_id(0) * WHOLE + lane // SIZE
        active = (lane // SIZE < WHOLE) & (tile < tiles)
        o = lane % SIZE
    else:
        number = tl.program_id(0).to(tl.int64) * BLOCK + lane
        tile = (number // SIZE).to(tl.int32)
        active = number < tiles.to(tl.int64) * SIZE
        o = (number % SIZE).to(tl.int32)
    return o, tile, active


@triton.jit
def _patch(
    source,
    upper,
    norm,  # scale of the lower tap, of the upper one, shift
    valid,
    edges,  # top, left, height, width
    P_CHANNELS: tl.constexpr,
    PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr,
    FIRST: tl.constexpr,
    UPPER_IN: tl.constexpr,
):
    """Expanded values of a patch, row by row: interpolated, batch norm, activation; zeros outside of the image."""
    top, left, height, width = edges
    values = ()
    for y in tl.static_range(PATCH_Y):
        row = source + y * width * P_CHANNELS
        row_ok = valid & (top + y >= 0) & (top + y < height)
        lower, higher = (), ()
        for x in tl.static_range(PATCH_X):  # all loads of a row first, so that they are under way together
            ok = row_ok & (left + x >= 0) & (left + x < width)
            lower = lower + (tl.load(row + x * P_CHANNELS, mask=ok),)  # noqa: RUF005
            if UPPER_IN:
                higher = higher + (tl.load(row + upper + x * P_CHANNELS, mask=ok),)  # noqa: RUF005
        for x in tl.static_range(PATCH_X):
            ok = row_ok & (left + x >= 0) & (left + x < width)
            e = lower[x].to(tl.float32) * norm[0] + norm[2]
            if UPPER_IN:
                e += higher[x].to(tl.float32) * norm[1]
            values = values + (tl.where(ok, _activate(e, FIRST), 0.0),)  # noqa: RUF005
    return values


@triton.jit
def _rows(constants, o, FROM: tl.constexpr, TO: tl.constexpr, SIZE: tl.constexpr):
    values = (tl.load(constants + FROM * SIZE + o),)
    for row in tl.static_range(FROM + 1, TO):
        values = values + (tl.load(constants + row * SIZE + o),)  # noqa: RUF005
    return values


@triton.jit
def _windows(
    e,
    bias,
    weights,
    TILE_Y: tl.constexpr,
    TILE_X: tl.constexpr,
    PATCH_X: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Depthwise convolution of a patch with its batch norm, and the activation."""
    values = ()
    for y in tl.static_range(TILE_Y):
        for x in tl.static_range(TILE_X):
            f = bias
            for u in tl.static_range(KERNEL):
                for v in tl.static_range(KERNEL):
                    f += weights[u * KERNEL + v] * e[(y * STRIDE + u) * PATCH_X + x * STRIDE + v]
            values = values + (_activate(f, SECOND),)  # noqa: RUF005
    return values


@triton.jit
def _added(sums, values, share, COUNT: tl.constexpr):
    found = ()
    for n in tl.static_range(COUNT):
        found = found + (sums[n] + share * values[n],)  # noqa: RUF005
    return found


@triton.jit
def _store(place, o, value, ok, SIZE: tl.constexpr, Z_CHANNELS: tl.constexpr):
    """One pixel of the sums; the columns up to a multiple of 8 are a one, which the bias multiplies, and zeros."""
    dtype: tl.constexpr = place.dtype.element_ty
    tl.store(place + o, value.to(dtype), mask=ok)
    for start in tl.static_range(SIZE, Z_CHANNELS, SIZE):
        extra = tl.where(start + o == SIZE, 1.0, 0.0).to(dtype)
        tl.store(place + start + o, extra, mask=ok & (start + o < Z_CHANNELS))


# nothing becomes faster by knowing these at compile time, and every case would be compiled again
@triton.jit(do_not_specialize=["layers", "batch", "height", "width", "out_height", "out_width"])
def middle(
    product_map,  # (batch, height, width, P_CHANNELS)
    sums,  # (batch, out_height, out_width, Z_CHANNELS)
    indices,  # (layers, 2 or 1, SIZE): lower, upper - lower; lower is -1 where a layer has no channel
    constants,  # (layers, 5 + k * k or one more, SIZE): see `pack_triton`
    layers,
    batch,
    height,
    width,
    out_height,
    out_width,
    P_CHANNELS: tl.constexpr,
    Z_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    UPPER_IN: tl.constexpr,
    UPPER_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_Y: tl.constexpr,
    TILE_X: tl.constexpr,
):
    PATCH_Y: tl.constexpr = (TILE_Y - 1) * STRIDE + KERNEL
    PATCH_X: tl.constexpr = (TILE_X - 1) * STRIDE + KERNEL
    PIXELS: tl.constexpr = TILE_Y * TILE_X
    ROWS: tl.constexpr = 5 + KERNEL * KERNEL + UPPER_OUT
    tiles_x = (out_width + TILE_X - 1) // TILE_X
    tiles_image = (out_height + TILE_Y - 1) // TILE_Y * tiles_x
    o, tile, active = _place(batch * tiles_image, SIZE, UPPER_OUT, BLOCK)
    image, out_y, out_x = tile // tiles_image, tile % tiles_image // tiles_x * TILE_Y, tile % tiles_x * TILE_X
    edges = (out_y * STRIDE - PADDING, out_x * STRIDE - PADDING, height, width)
    corner = product_map + ((image.to(tl.int64) * height + edges[0]) * width + edges[1]) * P_CHANNELS
    low, high = _zeros(PIXELS, BLOCK), _zeros(PIXELS, BLOCK)
    for layer in range(layers):
        lower = tl.load(indices + layer * (1 + UPPER_IN) * SIZE + o)
        upper = tl.load(indices + (layer * (1 + UPPER_IN) + UPPER_IN) * SIZE + o)
        c = _rows(constants + layer * ROWS * SIZE, o, 0, ROWS, SIZE)
        valid = active & (lower >= 0)
        e = _patch(corner + lower, upper, c, valid, edges, P_CHANNELS, PATCH_Y, PATCH_X, FIRST, UPPER_IN)
        f = _windows(e, c[3], c[5:], TILE_Y, TILE_X, PATCH_X, KERNEL, STRIDE, SECOND)
        low = _added(low, f, c[4], PIXELS)
        if UPPER_OUT:
            high = _added(high, f, c[ROWS - 1], PIXELS)

    target = sums + ((image.to(tl.int64) * out_height + out_y) * out_width + out_x) * Z_CHANNELS
    lane = tl.arange(0, BLOCK)
    below = lane // SIZE * SIZE + (lane % SIZE + SIZE - GROUP % SIZE) % SIZE  # the lane whose upper tap is this one
    below = tl.minimum(below, BLOCK - 1)  # lanes after the last whole tile have none
    for y in tl.static_range(TILE_Y):
        for x in tl.static_range(TILE_X):
            total = low[y * TILE_X + x]
            if UPPER_OUT:
                total += tl.gather(high[y * TILE_X + x], below, 0)
            ok = active & (out_y + y < out_height) & (out_x + x < out_width)
            _store(target + (y * out_width + x) * Z_CHANNELS, o, total, ok, SIZE, Z_CHANNELS)
