// Attention of few queries over the pages of a cache: decode whose keys lie in listed pages.
//
// A task is a (batch, kv head, slots of 512 keys). A step takes up to 256 keys from any pages, which
// are read in place. Pages of int8 have a factor each: that of keys is applied to s, that of values
// to p.
#pragma once

#include "decode.h"

namespace xsake_cpu::XSAKE_ISA {

template <class F>
XS_INLINE void with_page_dtype(const Problem& p, F&& f) {
  p.page_dtype == DType::i8 ? f(int8_t{}) : with_dtype(p.page_dtype, f);
}

class PagedTask : DecodeTask {
 public:
  PagedTask(const Problem& p, int64_t item, char* scratch) : DecodeTask(p, item, scratch) {}

  void run() {
    const int64_t rows = p_.q_tokens * p_.group();
    const int64_t slots = chunk_blocks(p_.block_kv), begin = task_.chunk * slots;
    const int64_t end = min_of(begin + slots, p_.kv_blocks);
    const int64_t list = task_.b * p_.page_heads + (p_.page_heads == 1 ? 0 : task_.first_head);
    for (first_ = 0; first_ < rows; first_ += kDecodeRows) {
      count_ = min_of(kDecodeRows, rows - first_);
      padded_ = round_up(count_, kDotRows);
      load_tile();
      for (int64_t i = list * p_.kv_blocks + begin; i < list * p_.kv_blocks + end; i++)
        if (p_.page[i] >= 0) add_page(static_cast<int32_t>(i));
      flush();
      store_states();
    }
  }

 private:
  struct PagePiece {
    Piece piece;
    int32_t item;
    int64_t row;    // of the page and the head: its first element is row * dim
    int64_t scale;  // of the page and the head
  };

  void add_page(int32_t item) {
    const int64_t number = p_.page_number[item];
    const int64_t keys = min_of(p_.block_kv, p_.lengths[task_.b] - number * p_.block_kv);
    const int64_t head = p_.page[item] * p_.kv_heads + task_.first_head;
    for (int64_t at = 0; at < keys; at += kStepKeys) {
      const int64_t count = min_of(kStepKeys, keys - at), width = round_up(count, VL);
      if (columns_ + width > kStepKeys) flush();
      const bool is_masked = p_.is_partial[item] || count < width;
      pieces_[num_pieces_++] = {
          {nullptr, nullptr, number, at, columns_, width, count, is_masked},
          item,
          head * p_.block_kv + at,
          head};
      columns_ += width;
    }
  }

  void flush() {
    if (!num_pieces_) return;
    with_page_dtype(p_, [&](auto type) { add_step<decltype(type)>(); });
    num_pieces_ = 0;
    columns_ = 0;
  }

  // As for contiguous keys, whole vectors of finite values stay where they are.
  template <class T>
  void add_step() {
    Head& x = heads_[0];
    const bool is_cheap = !std::is_same_v<T, f16> || VL > 4;
    if (is_cheap && p_.dim % VL == 0 && p_.v_dim % kPanel == 0) {
      copy_state(x.softmax.acc, x.softmax.m, x.softmax.l, x.acc, x.m, x.l);
      if (add_pieces(static_cast<const T*>(p_.k), p_.dim, static_cast<const T*>(p_.v), p_.v_dim))
        return;
      copy_state(x.acc, x.m, x.l, x.softmax.acc, x.softmax.m, x.softmax.l);
    }
    for (int i = 0; i < num_pieces_; i++) {
      const PagePiece& y = pieces_[i];
      const auto rows = [&](const void* data, int64_t dim) {
        return TokenRows<T>{static_cast<const T*>(data) + y.row * dim, dim, y.piece.count, dim};
      };
      copy_rows(rows(p_.k, p_.dim), rows(p_.v, p_.v_dim), y.piece.column);
    }
    are_copies_ = true;
    add_pieces(x_.k, padded_dim_, x_.v, padded_v_dim_);
    are_copies_ = false;
  }

  // Rows of a piece: in the pages, or among the copies.
  int64_t first_row(const PagePiece& y) const { return are_copies_ ? y.piece.column : y.row; }

  // One step of the softmax; false if a value of v is not finite.
  template <class T>
  bool add_pieces(const T* k, int64_t k_row, const T* v, int64_t v_row) {
    Head& x = heads_[0];
    for (int i = 0; i < num_pieces_; i++) {
      const PagePiece& y = pieces_[i];
      float* s = x.softmax.s + y.piece.column;
      find_scores(x, s, k + first_row(y) * k_row, k_row, 0, y.piece.count);
      for (int64_t r = 0; r < padded_; r++)
        for (int64_t c = y.piece.count; c < y.piece.width; c++) s[r * kScoreStride + c] = kNegInf;
      if (p_.page_k_scale) scale_columns(x, y.piece, p_.page_k_scale[y.scale]);
    }
    update(x);
    bool is_finite = true;
    for (int i = 0; i < num_pieces_; i++) {
      const PagePiece& y = pieces_[i];
      if (p_.page_v_scale) scale_columns(x, y.piece, p_.page_v_scale[y.scale]);
      is_finite &= add_rows(x, x.softmax.s + y.piece.column, v + first_row(y) * v_row, v_row, 0,
                            y.piece.count, i ? nullptr : x.softmax.alpha);
    }
    return is_finite;
  }

  void scale_columns(const Head& x, const Piece& piece, float scale) const {
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t c = 0; c < piece.width; c += VL) {
        float* s = x.softmax.s + r * kScoreStride + piece.column + c;
        store(s, load(s) * scale);
      }
  }

  // s -> p, and m, l, alpha.
  void update(Head& x) {
    clear_max(x.softmax, padded_);
    for (int i = 0; i < num_pieces_; i++) {
      const PagePiece& y = pieces_[i];
      if (y.piece.is_masked) {
        for (int64_t r = 0; r < count_; r++) x.rows.item[r] = y.item;
        MaskBuilder(p_, x.rows, x_.mask, task_.b).build<VL>(y.piece, count_, padded_);
      }
      finish_scores(p_, y.piece, x.rows, x_.mask, x.softmax, task_.b, count_);
    }
    const int64_t width = round_up(columns_, kPanel);
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t c = columns_; c < width; c += VL)
        store(x.softmax.s + r * kScoreStride + c, splat(kNegInf));
    update_max(x.softmax, padded_);
    const Piece step{nullptr, nullptr, 0, 0, 0, width, width, false};
    update_sums(x.softmax, x_.mask, &step, 1, (int)padded_);
  }

  PagePiece pieces_[kStepKeys];
  int num_pieces_ = 0;
  int64_t columns_ = 0;
  bool are_copies_ = false;
};

static void paged_chunk(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  PagedTask(p, item, scratch).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
