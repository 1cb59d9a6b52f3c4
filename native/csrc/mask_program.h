// The element mask of a tile: padding, mask program, mask blocks, segment ids.
//
// Encoding of a program, an array of int32:
//   [] : no program, every pair is allowed
//   [num_steps, answer kind, answer number, answer type, steps...]
// A step has 10 numbers: operation, then three terms (kind, number, type); absent terms are zeros.
//   operation  index in the enumeration Op: and or xor not eq ne lt le gt ge add sub mul neg abs
//              sign min max div rem shift_left shift_right_arithmetic shift_right_logical
//              population_count clz select_n to_bool to_int32 to_uint32
//   kind       0 none, 1 position (number 0: query, 1: key), 2 constant (the bits of the value),
//              3 table (row of `tables`), 4 step (index of an earlier step)
//   type       0 bool, 1 int32, 2 uint32; of a step: the type of its result
// `tables` is [rows, program_heads]; query head h reads column h * program_heads / q_heads.
// Integers wrap. x / 0 is -1, x % 0 is x, the minimum / -1 is the minimum, as in XLA.
//
// Booleans are 0 and -1 here, so that they are masks of lanes.
#pragma once

#include "scratch.h"
#include "vec.h"

namespace xsake_cpu::XSAKE_ISA {

// Values of a term: `step` is 1, or 0 where every lane has the same one.
struct Values {
  const int32_t* data;
  int64_t step;
};

template <class F>
XS_INLINE void for_vectors(const Values (&x)[3], int32_t* to, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += VL)
    store(to + i, f(load(x[0].data + i * x[0].step), load(x[1].data + i * x[1].step)));
}
template <class F>
XS_INLINE void for_lanes(const Values (&x)[3], int32_t* to, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i++) to[i] = f(x[0].data[i * x[0].step], x[1].data[i * x[1].step]);
}

XS_INLINE int32_t divide(int32_t x, int32_t y) {
  if (y == 0) return -1;
  return y == -1 ? (int32_t)(0u - (uint32_t)x) : x / y;
}
XS_INLINE int32_t remainder(int32_t x, int32_t y) {
  if (y == 0) return x;
  return y == -1 ? 0 : x % y;
}

// Operations whose result depends on the sign.
static void run_ordered(Op op, bool is_unsigned, const Values (&x)[3], int32_t* to, int64_t n) {
  const vi flip =
      splat(is_unsigned ? (int32_t)0x80000000 : 0);  // to signed numbers in the same order
  switch (op) {
    case Op::lt: return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) < (b ^ flip); });
    case Op::le: return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) <= (b ^ flip); });
    case Op::gt: return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) > (b ^ flip); });
    case Op::ge: return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) >= (b ^ flip); });
    case Op::min:
      return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) < (b ^ flip) ? a : b; });
    case Op::max:
      return for_vectors(x, to, n, [&](vi a, vi b) { return (a ^ flip) > (b ^ flip) ? a : b; });
    case Op::abs:
      return for_vectors(
          x, to, n, [&](vi a, vi) { return is_unsigned ? a : (a < 0 ? (vi)(0u - (vu)a) : a); });
    case Op::sign:
      return for_vectors(x, to, n, [&](vi a, vi) {
        return is_unsigned ? (vi)(a != 0) & 1 : ((a > 0) & 1) | (a < 0);
      });
    case Op::div:
      return for_lanes(x, to, n, [&](int32_t a, int32_t b) {
        if (!is_unsigned) return divide(a, b);
        return b == 0 ? -1 : (int32_t)((uint32_t)a / (uint32_t)b);
      });
    default:  // rem
      return for_lanes(x, to, n, [&](int32_t a, int32_t b) {
        if (!is_unsigned) return remainder(a, b);
        return b == 0 ? a : (int32_t)((uint32_t)a % (uint32_t)b);
      });
  }
}

static void run_bits(Op op, const Values (&x)[3], int32_t* to, int64_t n) {
  switch (op) {
    case Op::shift_left:
      return for_vectors(x, to, n, [](vi a, vi b) { return (vi)((vu)a << ((vu)b & 31u)); });
    case Op::shift_right_arithmetic:
      return for_vectors(x, to, n, [](vi a, vi b) { return a >> (b & 31); });
    case Op::shift_right_logical:
      return for_vectors(x, to, n, [](vi a, vi b) { return (vi)((vu)a >> ((vu)b & 31u)); });
    case Op::population_count:
      return for_lanes(x, to, n,
                       [](int32_t a, int32_t) { return __builtin_popcount((uint32_t)a); });
    default:  // clz
      return for_lanes(x, to, n,
                       [](int32_t a, int32_t) { return a ? __builtin_clz((uint32_t)a) : 32; });
  }
}

static void run_step(const ProgramStep& step, const Values (&x)[3], int32_t* to, int64_t n) {
  const TermType type = step.terms[0].type;
  switch (step.op) {
    case Op::and_: return for_vectors(x, to, n, [](vi a, vi b) { return a & b; });
    case Op::or_: return for_vectors(x, to, n, [](vi a, vi b) { return a | b; });
    case Op::xor_: return for_vectors(x, to, n, [](vi a, vi b) { return a ^ b; });
    case Op::not_: return for_vectors(x, to, n, [](vi a, vi) { return ~a; });
    case Op::eq: return for_vectors(x, to, n, [](vi a, vi b) { return a == b; });
    case Op::ne: return for_vectors(x, to, n, [](vi a, vi b) { return a != b; });
    case Op::add: return for_vectors(x, to, n, [](vi a, vi b) { return (vi)((vu)a + (vu)b); });
    case Op::sub: return for_vectors(x, to, n, [](vi a, vi b) { return (vi)((vu)a - (vu)b); });
    case Op::mul: return for_vectors(x, to, n, [](vi a, vi b) { return (vi)((vu)a * (vu)b); });
    case Op::neg: return for_vectors(x, to, n, [](vi a, vi) { return (vi)(0u - (vu)a); });
    case Op::select_n:
      for (int64_t i = 0; i < n; i += VL) {
        const vi which = load(x[0].data + i * x[0].step);
        store(to + i, (which & load(x[2].data + i * x[2].step)) |
                          (~which & load(x[1].data + i * x[1].step)));
      }
      return;
    case Op::to_bool: return for_vectors(x, to, n, [](vi a, vi) { return a != 0; });
    case Op::to_int32:
    case Op::to_uint32: {
      const vi keep = splat(type == TermType::boolean ? 1 : -1);
      return for_vectors(x, to, n, [&](vi a, vi) { return a & keep; });
    }
    case Op::shift_left:
    case Op::shift_right_arithmetic:
    case Op::shift_right_logical:
    case Op::population_count:
    case Op::clz: return run_bits(step.op, x, to, n);
    default: return run_ordered(step.op, type == TermType::uint32, x, to, n);
  }
}

// Keys of a piece of a step: columns of the tile from `column` on.
struct Piece {
  const float *k, *v;  // packed, of its first key
  int64_t kv_block;
  int64_t first;   // key of the block that column 0 of the piece is
  int64_t column;  // in the tile
  int64_t width;   // columns, padded to panels
  int64_t count;   // keys that exist
  bool is_masked;
};

// Evaluates the element mask of one piece for rows of a tile.
class MaskBuilder {
 public:
  MaskBuilder(const Problem& p, const TileRows& rows, const MaskScratch& scratch, int64_t b)
      : p_(p), rows_(rows), scratch_(scratch), b_(b) {}

  // Mask of the first `num_rows` rows, and the state of panels of all `padded_rows`.
  template <int panel>
  void build(const Piece& piece, int64_t num_rows, int64_t padded_rows) {
    load_keys(piece);
    if (p_.program) run_axis(Axis::key, 0, piece.width);
    for (int64_t r = 0; r < num_rows; r++) build_row<panel>(piece, r);
    for (int64_t r = num_rows; r < padded_rows; r++)
      for (int64_t c = 0; c < piece.width; c += panel)
        scratch_.state[r * kStateStride + (piece.column + c) / panel] = 0;
  }

 private:
  template <int panel>
  void build_row(const Piece& piece, int64_t r) {
    int8_t* mask = scratch_.mask + r * kStepKeys + piece.column;
    uint8_t* state = scratch_.state + r * kStateStride + piece.column / panel;
    const int32_t item = rows_.item[r];
    const bool is_partial = item >= 0 && p_.is_partial[item];
    const Values allowed = is_partial ? row_values(r, piece) : constant(0, item < 0 ? 0 : -1);
    const bool has_segments = is_partial && p_.q_segments;
    const uint8_t* block = nullptr;
    if (is_partial && p_.mask_blocks)
      block = p_.mask_blocks +
              (p_.mask_index[item] * p_.block_q + rows_.token[r] % p_.block_q) * p_.block_kv +
              piece.first;
    for (int64_t c = 0; c < piece.width; c += panel) {
      vi some = vi{}, every = splat(-1);
      XS_UNROLL
      for (int64_t n = c; n < c + panel; n += VL) {
        vi x = load(scratch_.key_valid + n) & load(allowed.data + n * allowed.step);
        if (has_segments) x &= same_segment(r, n);
        if (block) x &= load_block(block + n, piece.count - n);
        const vb bytes = __builtin_convertvector(x, vb);
        std::memcpy(mask + n, &bytes, sizeof(bytes));
        some |= x;
        every &= x;
      }
      state[c / panel] = static_cast<uint8_t>((any(some) ? 1 : 0) | (any(~every) ? 2 : 0));
    }
  }

  void load_keys(const Piece& piece) {
    const int64_t token = piece.kv_block * p_.block_kv + piece.first;
    const int32_t* positions =
        p_.kv_positions ? p_.kv_positions + b_ % p_.kv_positions_batch * p_.kv_tokens : nullptr;
    const int32_t* segments = p_.kv_segments ? p_.kv_segments + b_ * p_.kv_tokens : nullptr;
    for (int64_t c = 0; c < piece.width; c++) {
      const bool exists = c < piece.count;
      scratch_.key_valid[c] = exists ? -1 : 0;
      scratch_.key_position[c] = exists && positions ? positions[token + c] : (int32_t)(token + c);
      scratch_.key_segment[c] = exists && segments ? segments[token + c] : -1;
    }
  }

  vi same_segment(int64_t r, int64_t c) const {
    const int32_t id = rows_.segment[r];
    return id < 0 ? vi{} : (load(scratch_.key_segment + c) == id);
  }

  static vi load_block(const uint8_t* from, int64_t n) {
    uint8_t part[VL] = {};
    if (n > 0) std::memcpy(part, from, static_cast<size_t>(min_of(n, VL)));
    vi x;
    for (int i = 0; i < VL; i++) x[i] = part[i] ? -1 : 0;
    return x;
  }

  // The program's answer for a row; every lane -1 without a program.
  Values row_values(int64_t r, const Piece& piece) {
    if (!p_.program) return constant(0, -1);
    run_axis(Axis::query, r, VL);
    run_axis(Axis::both, r, piece.width);
    Values x = values(p_.program->answer, r, 0);
    return p_.program->answer_axis == Axis::query ? Values{x.data, 0} : x;
  }

  void run_axis(Axis axis, int64_t r, int64_t n) {
    const MaskProgram& program = *p_.program;
    for (int32_t i = 0; i < program.num_steps; i++) {
      const ProgramStep& step = program.steps[i];
      if (step.axis != axis) continue;
      Values x[3];
      for (int t = 0; t < 3; t++) x[t] = values(step.terms[t], r, t);
      run_step(step, x, scratch_.steps + i * kStepKeys, n);
    }
  }

  Values constant(int slot, int32_t number) {
    store(constants_[slot], splat(number));
    return {constants_[slot], 0};
  }

  Values values(const Term& term, int64_t r, int slot) {
    switch (term.kind) {
      case TermKind::position:
        return term.number ? Values{scratch_.key_position, 1} : constant(slot, rows_.position[r]);
      case TermKind::table: {
        const int64_t head = rows_.head[r] * p_.program_heads / p_.q_heads;
        const int32_t number = p_.tables[term.number * p_.program_heads + head];
        return constant(slot, term.type == TermType::boolean ? -(number != 0) : number);
      }
      case TermKind::step:
        return {scratch_.steps + term.number * kStepKeys,
                p_.program->steps[term.number].axis != Axis::query};
      default:
        return constant(slot, term.type == TermType::boolean ? -(term.number != 0) : term.number);
    }
  }

  const Problem& p_;
  const TileRows& rows_;
  const MaskScratch& scratch_;
  const int64_t b_;
  int32_t constants_[3][VL];
};

}  // namespace xsake_cpu::XSAKE_ISA
