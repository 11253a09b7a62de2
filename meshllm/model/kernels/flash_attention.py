"""Causal attention of many rows, by an instruction that multiplies pairs of bf16.

Theory of operation
-------------------
Scores are never stored whole: `ROWS` rows of a head take the keys they see in blocks of `BLOCK`,
counted from the first key that is given, and keep the largest score, the sum of the exponentials
and the weighted sum of the values so far (FlashAttention). A block of scores and exponentials stays
in the CPU cache. Exponentials are rounded to bf16 before values are multiplied by them, and summed
as rounded.

Both products take pairs of 16-bit numbers that are neighbours in the sum: of a key, and of two
successive values. So keys and values are first copied to such pairs, once for all rows: keys to
[S / 32, D / 2, 32, 2], values to [S / 2, E, 2].

Every sum is in the order of the keys, whatever rows are computed together and however many: a row
has the same bits in any chunk of a prompt, with any number of threads, if all keys of the session
are given. Of a sliding window those before the first row's are not, so there the bits depend on it.
"""

from collections.abc import Mapping
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.kernels.ir import FLOAT, HALF, LANES, WORD, Code, bits_of, float_of
from meshllm.model.kernels.jit import JitFunction

ROWS = 12
"""Rows that are computed together: with two vectors of each, their sums fill the registers."""
BLOCK = 512
"""Keys of a block; their scores for all `ROWS` fit in the fastest CPU cache."""

_WIDE = 2 * LANES  # keys, or numbers of a value, that are multiplied together
_LEAST = -1e30  # less than any score; differences of it are finite
_PACK = (
    *("*key", "key_head", "key_row", "*value", "value_head", "value_row"),
    *("*keys", "*values", "count", "groups"),
)
_FLASH = (
    *("*query", "query_head", "query_row", "*keys", "*values", "*mixed", "*scratch", "heads"),
    *("each", "tiles", "groups", "rows", "count", "window", "scale"),
)


def takes_width(width: int) -> bool:
    """Whether the width of a head is supported."""
    return not width % _WIDE


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the shapes and dtypes are supported; the CPU must have `Code.dot`."""
    tensors, widths = (query, key, value), (key.shape[3], value.shape[3])
    return (
        all(each.is_cpu and each.dtype == torch.bfloat16 for each in tensors)
        and all(each.stride(3) == 1 for each in tensors)
        and all(map(takes_width, widths))
        and 0 < query.shape[2] <= key.shape[2]
    )


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute causal attention of the last T positions: [1, T, H, E], bfloat16.

    query [1, H, T, D], key [1, G, S, D] and value [1, G, S, E] with H a multiple of G, see `takes`;
    ``window`` is the number of keys that a row sees, its own included.
    """
    heads, rows, width = query.shape[1:]
    groups, count, width_out = value.shape[1:]
    threads, blocks = torch.get_num_threads(), -(-count // _WIDE)
    keys = torch.empty(groups * blocks * _WIDE * width, dtype=torch.bfloat16)
    values = torch.empty(groups * blocks * _WIDE * width_out, dtype=torch.bfloat16)
    _pack(width, width_out)(
        *(groups * blocks, threads),
        *(key.data_ptr(), *key.stride()[1:3], value.data_ptr(), *value.stride()[1:3]),
        *(keys.data_ptr(), values.data_ptr(), count, blocks),
    )
    mixed = torch.empty(1, rows, heads, width_out, dtype=torch.bfloat16)
    scratch = torch.empty(threads * _ScratchLayout(width, width_out).words, dtype=torch.int32)
    tiles = -(-rows // ROWS)
    _flash(width, width_out)(
        *(heads * tiles, threads, query.data_ptr(), *query.stride()[1:3]),
        *(keys.data_ptr(), values.data_ptr(), mixed.data_ptr(), scratch.data_ptr(), heads),
        *(heads // groups, tiles, blocks, rows, count, window or count, bits_of(scale)),
    )
    return mixed


class _ScratchLayout:
    """Places in the scratch memory of a thread, in words."""

    def __init__(self, width: int, width_out: int) -> None:
        self.query = 0
        self.scores = ROWS * width // 2
        self.shares = self.scores + ROWS * BLOCK
        self.sums = self.shares + ROWS * BLOCK // 2
        self.peaks = self.sums + ROWS * width_out
        self.totals = self.peaks + LANES
        self.words = self.totals + LANES


@cache
def _pack(width: int, width_out: int) -> JitFunction:
    """Compile the copy of keys and values to pairs, for heads of a shape."""

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        group, number = do.udiv(block, fields["groups"]), do.urem(block, fields["groups"])
        first, last = do.mul(number, code.index(_WIDE)), do.sub(fields["count"], code.index(1))

        def row(name: str, index: ir.Value) -> ir.Value:
            """Return the address of a row; past the last (masked), that of the last."""
            index = do.select(do.icmp_unsigned("<", index, last), index, last)
            head = do.mul(group, fields[f"{name}_head"])
            return code.at(fields[name], do.add(head, do.mul(index, fields[f"{name}_row"])), HALF)

        keys = code.at(fields["keys"], do.mul(block, code.index(width // 2 * _WIDE)), WORD)
        for half in (0, LANES):
            lines = [row("key", do.add(first, code.index(half + at))) for at in range(LANES)]
            with code.loop(code.index(width // _WIDE)) as part:
                start = do.mul(part.index, code.index(LANES))
                square = [code.load(WORD, line, start, LANES) for line in lines]
                for at, column in enumerate(code.transpose(square)):
                    place = do.mul(do.add(start, code.index(at)), code.index(_WIDE))
                    code.store(WORD, column, keys, do.add(place, code.index(half)))
        values = code.at(fields["values"], do.mul(block, code.index(LANES * width_out)), WORD)
        with code.loop(code.index(LANES)) as pair:
            one = do.add(first, do.mul(pair.index, code.index(2)))
            both = row("value", one), row("value", do.add(one, code.index(1)))
            line = do.mul(pair.index, code.index(width_out))
            for at in range(0, width_out, LANES):
                words = ir.VectorType(WORD, LANES)
                low, high = (
                    do.zext(code.load(HALF, each, code.index(at), LANES), words) for each in both
                )
                paired = do.or_(low, do.shl(high, ir.Constant(words, [16] * LANES)))
                code.store(WORD, paired, values, do.add(line, code.index(at)))

    return JitFunction(_PACK, write)


@cache
def _flash(width: int, width_out: int) -> JitFunction:
    """Compile the attention for heads of a shape."""

    def write(
        code: Code, fields: Mapping[str, ir.Value], block: ir.Value, thread: ir.Value
    ) -> None:
        _FlashEmitter(code, fields, (width, width_out), block, thread).write()

    return JitFunction(_FLASH, write)


class _FlashEmitter:
    """Emits the attention of one tile of rows of one head."""

    def __init__(
        self,
        code: Code,
        fields: Mapping[str, ir.Value],
        widths: tuple[int, int],
        block: ir.Value,
        thread: ir.Value,
    ) -> None:
        self.code, self.do, self.fields = code, code.do, fields
        self.width, self.width_out = widths
        do, self.room = code.do, _ScratchLayout(*widths)
        self.scratch = code.at(fields["scratch"], do.mul(thread, code.index(self.room.words)), WORD)
        each, tiles, last = fields["each"], fields["tiles"], do.sub(fields["rows"], code.index(1))
        place, head = do.udiv(block, each), do.urem(block, each)
        self.group, tile = do.udiv(place, tiles), do.urem(place, tiles)
        self.head = do.add(do.mul(self.group, each), head)
        # The last tiles see the most keys, so they begin first.
        self.top = do.mul(do.sub(do.sub(tiles, code.index(1)), tile), code.index(ROWS))
        self.last = last
        self.past = do.sub(fields["count"], fields["rows"])

    def write(self) -> None:
        """Emit all parts."""
        code, do, fields, room = self.code, self.do, self.fields, self.room
        with code.loop(code.index(ROWS)) as row:
            self._begin(row.index)
        bottom = self._line(code.index(ROWS - 1))
        stop = do.add(do.add(self.past, bottom), code.index(1))
        start = self._start(do.add(do.add(self.past, self.top), code.index(1)))
        first = do.udiv(start, code.index(BLOCK))
        blocks = do.sub(_ceil(code, stop, BLOCK), first)
        pairs = do.mul(do.mul(self.group, fields["groups"]), code.index(LANES))
        with code.loop(blocks) as block:
            begin = do.mul(do.add(first, block.index), code.index(BLOCK))
            left = do.sub(stop, begin)
            is_last = do.icmp_unsigned("<", left, code.index(BLOCK))
            steps = _ceil(code, do.select(is_last, left, code.index(BLOCK)), _WIDE)
            pair = do.add(pairs, do.udiv(begin, code.index(2)))
            keys = code.at(fields["keys"], do.mul(pair, code.index(self.width)), WORD)
            self._score(keys, steps)
            with code.loop(code.index(ROWS)) as row:
                self._exponentiate(row.index, begin, do.mul(steps, code.index(2)))
            values = code.at(fields["values"], do.mul(pair, code.index(self.width_out)), WORD)
            self._mix(values, do.mul(steps, code.index(LANES)))
        with code.loop(code.index(ROWS)) as row:
            index = row.index
            total = code.splat(code.load(FLOAT, self._at(room.totals), index))
            share = do.fdiv(code.floats(1.0), total)
            line = do.add(do.mul(self._line(index), fields["heads"]), self.head)
            mixed = code.at(fields["mixed"], do.mul(line, code.index(self.width_out)), HALF)
            for place, at in self._sums(index):
                mean = do.fmul(code.load(FLOAT, self._at(room.sums), place, LANES), share)
                code.store(HALF, code.narrow(mean), mixed, code.index(at))

    def _begin(self, row: ir.Value) -> None:
        """Copy a query, and begin with nothing seen."""
        code, do, fields, room = self.code, self.do, self.fields, self.room
        head = do.mul(self.head, fields["query_head"])
        line = do.add(head, do.mul(self._line(row), fields["query_row"]))
        query = code.at(fields["query"], line, HALF)
        for at in range(0, self.width // 2, LANES):
            place = do.add(do.mul(row, code.index(self.width // 2)), code.index(at))
            pairs = code.load(WORD, query, code.index(at), LANES)
            code.store(WORD, pairs, self._at(room.query), place)
        for place, _ in self._sums(row):
            code.store(FLOAT, code.floats(0.0), self._at(room.sums), place)
        code.store(FLOAT, code.number(_LEAST), self._at(room.peaks), row)
        code.store(FLOAT, code.number(0.0), self._at(room.totals), row)

    def _score(self, keys: ir.Value, steps: ir.Value) -> None:
        """Multiply queries by keys and the scale, `_WIDE` keys at a time."""
        code, do, room = self.code, self.do, self.room
        scale, query = code.splat(float_of(code, self.fields["scale"])), self._at(room.query)
        with code.loop(steps) as step:
            size = code.index(self.width // 2 * _WIDE)
            block = code.at(keys, do.mul(step.index, size), WORD)
            found = self._dot(block, code.index(self.width // 2), _WIDE, query, self.width // 2)
            sums, start = iter(found), do.mul(step.index, code.index(_WIDE))
            for row in range(ROWS):
                for at in (0, LANES):
                    place = do.add(start, code.index(row * BLOCK + at))
                    score = do.fmul(next(sums), scale)
                    code.store(FLOAT, score, self._at(room.scores), place)

    def _exponentiate(self, row: ir.Value, begin: ir.Value, vectors: ir.Value) -> None:
        """Replace the scores of a row by exponentials; scale what it has so far."""
        code, do, room = self.code, self.do, self.room
        stop = do.add(do.add(self.past, self._line(row)), code.index(1))
        low, high = (
            code.splat(do.trunc(do.sub(each, begin), WORD)) for each in (self._start(stop), stop)
        )
        lanes = ir.Constant(ir.VectorType(WORD, LANES), list(range(LANES)))
        scores = code.at(self._at(room.scores), do.mul(row, code.index(BLOCK)), FLOAT)
        shares = code.at(self._at(room.shares), do.mul(row, code.index(BLOCK)), HALF)

        def seen(at: ir.Value) -> ir.Value:
            number = do.add(code.splat(do.trunc(at, WORD)), lanes)
            above = do.icmp_signed(">=", number, low)
            return do.and_(above, do.icmp_signed("<", number, high))

        before = code.load(FLOAT, self._at(room.peaks), row)
        with code.loop(vectors, code.splat(before)) as loop:
            at, most = do.mul(loop.index, code.index(LANES)), loop.carried[0]
            score = do.select(seen(at), code.load(FLOAT, scores, at, LANES), most)
            loop.next.append(do.select(do.fcmp_ordered(">", score, most), score, most))
        peak = code.splat(code.largest(loop.next[0]))
        with code.loop(vectors, code.floats(0.0)) as loop:
            at = do.mul(loop.index, code.index(LANES))
            power = code.exp(do.fsub(code.load(FLOAT, scores, at, LANES), peak))
            share = code.narrow(do.select(seen(at), power, code.floats(0.0)))
            code.store(HALF, share, shares, at)
            loop.next.append(do.fadd(loop.carried[0], code.widen(share)))
        less = code.exp(do.fsub(code.splat(before), peak))
        one = do.extract_element(less, ir.Constant(WORD, 0))
        total = do.fmul(code.load(FLOAT, self._at(room.totals), row), one)
        total = do.fadd(total, code.sum(loop.next[0]))
        code.store(FLOAT, total, self._at(room.totals), row)
        first = do.extract_element(peak, ir.Constant(WORD, 0))
        code.store(FLOAT, first, self._at(room.peaks), row)
        for place, _ in self._sums(row):
            mixed = code.load(FLOAT, self._at(room.sums), place, LANES)
            code.store(FLOAT, do.fmul(mixed, less), self._at(room.sums), place)

    def _mix(self, values: ir.Value, pairs: ir.Value) -> None:
        """Add the values of a block, weighted by the exponentials."""
        code, room = self.code, self.room
        shares = self._at(room.shares)
        for start in range(0, self.width_out, _WIDE):
            places = [
                code.index(row * self.width_out + start + at)
                for row in range(ROWS)
                for at in (0, LANES)
            ]
            before = [code.load(FLOAT, self._at(room.sums), place, LANES) for place in places]
            block = code.at(values, code.index(start), WORD)
            sums = self._dot(block, pairs, self.width_out, shares, BLOCK // 2, before)
            for place, total in zip(places, sums, strict=True):
                code.store(FLOAT, total, self._at(room.sums), place)

    def _dot(
        self,
        columns: ir.Value,
        count: ir.Value,
        stride: int,
        rows: ir.Value,
        length: int,
        before: list[ir.Value] | None = None,
    ) -> list[ir.Value]:
        """Multiply rows [ROWS, length] by `_WIDE` columns [count, stride], in pairs."""
        code, do = self.code, self.do
        start = before or [code.floats(0.0)] * (2 * ROWS)
        with code.loop(count, *start) as loop:
            line = do.mul(loop.index, code.index(stride))
            words = [
                code.load(WORD, columns, do.add(line, code.index(at)), LANES) for at in (0, LANES)
            ]
            sums = iter(loop.carried)
            for row in range(ROWS):
                place = do.add(loop.index, code.index(row * length))
                pair = code.splat(code.load(WORD, rows, place))
                loop.next += [code.dot(word, pair, next(sums)) for word in words]
        return loop.next

    def _at(self, place: int) -> ir.Value:
        return self.code.at(self.scratch, self.code.index(place), WORD)

    def _sums(self, row: ir.Value) -> list[tuple[ir.Value, int]]:
        """Return the places of a row's weighted sums, and of the numbers among its own."""
        line = self.do.mul(row, self.code.index(self.width_out))
        places = range(0, self.width_out, LANES)
        return [(self.do.add(line, self.code.index(at)), at) for at in places]

    def _line(self, row: ir.Value) -> ir.Value:
        """Return the number of a row of the tile; rows after the last are computed as it is."""
        line = self.do.add(self.top, row)
        return self.do.select(self.do.icmp_unsigned("<", line, self.last), line, self.last)

    def _start(self, stop: ir.Value) -> ir.Value:
        """Return the first key that a row sees, given the one after its last."""
        do, window = self.do, self.fields["window"]
        slides = do.icmp_unsigned(">", stop, window)
        return do.select(slides, do.sub(stop, window), self.code.index(0))


def _ceil(code: Code, count: ir.Value, size: int) -> ir.Value:
    return code.do.udiv(code.do.add(count, code.index(size - 1)), code.index(size))
