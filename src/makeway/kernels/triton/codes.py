"""Device functions below `unpack`: words from unaligned bytes, and fields of words as codes that tensor cores take.

Owns plane order and the ways to turn bit fields into bf16 two at a time. Never knows a type's layout.
Hazard: 32-bit words are unsigned, so that shifts bring in zeros; a signed operand in an expression changes that.

Plane order follows the bytes: two codes of 16 bits share one 32-bit word of the block (bytes 0 and 2, or 1 and 3), so
unpacking handles two at a time. All even bytes come first, then the odd ones; or word by word (even, then odd bytes),
where that is how the compiler spreads the operands of a product over threads, so that codes and activations stay in
the threads that loaded them.
"""

import triton
import triton.language as tl

# Triton 3.6 gives a thread four neighbours of an operand made from words, 3.9 two; only speed depends on it.
FOUR_NEIGHBOURS = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))

# ---- order ----------------------------------------------------------------------------------------------------------


@triton.jit
def plane_order(x):
    """x [n, width] in weight order -> plane order."""
    n: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    if FOUR_NEIGHBOURS and width == 16:
        return x.reshape(n, width // 4, 2, 2).permute(0, 1, 3, 2).reshape(n, width)
    else:  # noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)
        return x.reshape(n, width // 4, 2, 2).permute(0, 3, 1, 2).reshape(n, width)


@triton.jit
def weight_order(codes):
    """codes [n, width] in plane order -> weight order."""
    n: tl.constexpr = codes.shape[0]
    width: tl.constexpr = codes.shape[1]
    if FOUR_NEIGHBOURS and width == 16:
        return codes.reshape(n, width // 4, 2, 2).permute(0, 1, 3, 2).reshape(n, width)
    else:  # noqa: RET505
        return codes.reshape(n, 2, width // 4, 2).permute(0, 2, 3, 1).reshape(n, width)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@triton.jit
def words(at, N: tl.constexpr, SKEW: tl.constexpr):
    """N little-endian words from u8 pointers `at` [R, 1] on: u32 [R, N].

    SKEW: what every pointer is modulo 4, or less than 0 where that is not known. Unless it is 0, the aligned words
    around are read (none outside the range) and shifted together.
    """
    i = tl.arange(0, N)[None, :]
    if SKEW < 0:
        return skewed_words(at, skew_of(at), N)
    elif SKEW % 4 == 0:  # noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)
        return tl.load(at.to(tl.pointer_type(tl.uint32)) + i)
    else:
        base = (at - SKEW % 4).to(tl.pointer_type(tl.uint32)) + i
        return (tl.load(base) >> (8 * (SKEW % 4))) | (tl.load(base + 1) << (32 - 8 * (SKEW % 4)))


@triton.jit
def single_words(at, N: tl.constexpr):
    """As `words` with a SKEW of 0, but loaded one by one, so that each goes straight to the thread that unpacks it.

    The compiler must not know that neighbours could be loaded together: the skew, which is 0, hides it.
    """
    return tl.load((at - skew_of(at)).to(tl.pointer_type(tl.uint32)) + tl.arange(0, N)[None, :])


@triton.jit
def skew_of(at):
    """Pointers modulo 4, as i32."""
    return (at.to(tl.int64) & 3).to(tl.int32)


@triton.jit
def skewed_words(at, skew, N: tl.constexpr):
    """As `words`, where the pointers modulo 4 are known as a tensor or one number: `skew`, i32."""
    base = (at - skew).to(tl.pointer_type(tl.uint32)) + tl.arange(0, N)[None, :]
    first = tl.load(base)
    second = tl.load(base + tl.minimum(skew, 1))  # aligned after all: the same word, which the shifts drop
    shift = skew * 8
    return (first >> shift) | ((second << 1) << (31 - shift))


@triton.jit
def later(skew: tl.constexpr, n: tl.constexpr) -> tl.constexpr:
    """The SKEW n bytes on."""
    return skew if skew < 0 else (skew + n) % 4


@triton.jit
def f16_at(at):
    """f16 at u8 pointers (multiples of 2), as f32."""
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def f16_of(word):
    """The f16 in the low half of u32, as f32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def moved(word, S: tl.constexpr):
    """u32 shifted right by S, or left by -S."""
    if S >= 0:
        return word >> S
    else:  # noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)
        return word << -S


@triton.jit
def byte_of(word, B: tl.constexpr):
    """Byte B of u32 as i32, 0..255."""
    return ((word >> (8 * B)) & 0xFF).to(tl.int32)


# ---- codes ----------------------------------------------------------------------------------------------------------


@triton.jit
def pairs(even, odd):
    """bf16 bit patterns, two in each u32 [R, W] -> bf16 [R, 4 W] in plane order."""
    rows: tl.constexpr = even.shape[0]
    n: tl.constexpr = even.shape[1]
    e = tl.join(even.to(tl.uint16), (even >> 16).to(tl.uint16))
    o = tl.join(odd.to(tl.uint16), (odd >> 16).to(tl.uint16))
    if FOUR_NEIGHBOURS and n == 4:
        return tl.join(e, o).permute(0, 1, 3, 2).reshape(rows, 4 * n).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return tl.join(e, o).permute(0, 3, 1, 2).reshape(rows, 4 * n).to(tl.bfloat16, bitcast=True)


@triton.jit
def biased(even, odd):
    """Codes 0..127, at bits 0 and 16 of u32 [R, W] -> bf16 [R, 4 W] of 128 + code: 0x4300 is 128, its unit is 1."""
    return pairs(even | 0x43004300, odd | 0x43004300)


@triton.jit
def nibbles(q, S: tl.constexpr):
    """The low (S = 0) or high (S = 4) halves of all bytes of q u32 [R, W], biased."""
    return biased((q >> S) & 0x000F000F, (q >> (S + 8)) & 0x000F000F)


@triton.jit
def nibbles_and_fifth(q, S: tl.constexpr, qh, F: tl.constexpr):
    """As `nibbles`, with the fifth bit of weight j (of 16) at bit F + j of qh u32 [R, 1]."""
    j = tl.arange(0, 4)[None, :] * 4 + F
    # bits 0 and 2 go to 4 and 20; the product's other bits are masked off
    even = ((((qh >> j) & 5) * 0x40010) & 0x00100010) | ((q >> S) & 0x000F000F)
    odd = ((((qh >> (j + 1)) & 5) * 0x40010) & 0x00100010) | ((q >> (S + 8)) & 0x000F000F)
    return biased(even, odd)


@triton.jit
def looked_up(q, S: tl.constexpr, table):
    """As `nibbles`, but the nibbles are indices into `code_table`; no bias."""
    even = (q >> S) & 0x000F000F
    odd = (q >> (S + 8)) & 0x000F000F
    return pairs(tl.load(table + ((even | (even >> 12)) & 0xFF)), tl.load(table + ((odd | (odd >> 12)) & 0xFF)))


@triton.jit
def e2m1(q, S: tl.constexpr):
    """As `nibbles`, but the nibbles are E2M1 numbers, doubled; no bias.

    Their exponent and fraction sit on top of bf16's: 2^-126 times the number, subnormal where it is 0.5. A negative
    zero stays negative.
    """
    even = (q >> S) & 0x000F000F
    odd = (q >> (S + 8)) & 0x000F000F
    even = ((even & 0x00070007) << 6) | ((even & 0x00080008) << 12)
    odd = ((odd & 0x00070007) << 6) | ((odd & 0x00080008) << 12)
    return pairs(even, odd) * 1.7014118346046923e38  # 2^127


@triton.jit
def signed_bytes(q):
    """All bytes of q u32 [R, W] as signed numbers, exact in bf16: (128 + low seven bits) - (128 or 256)."""
    low = pairs((q & 0x007F007F) | 0x43004300, ((q >> 8) & 0x007F007F) | 0x43004300)
    return low - pairs((q & 0x00800080) | 0x43004300, ((q >> 8) & 0x00800080) | 0x43004300)
