// Launcher of paged attention on the CPU: plan, run the tasks on the pool, merge the rows whose
// keys were cut. See plan.h for the cut, attend_body.h for the arithmetic.
//
// Work: 4 * head_dim FLOPs for each visible (row, key) pair; a KV head's keys and values are read
// once by every task, so once per sequence in a decode.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu/attention/plan.h"
#include "cpu/attention/task.h"
#include "cpu/element_dispatch.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/target.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::cpu {
namespace {

const AttentionKernels& kernels_for(const PagedAttentionParams& params) {
  switch (active_isa()) {
    case Isa::kScalar:
      return scalar::kAttentionKernels;
#if PAGEDKV_HAS_X86_KERNELS
    case Isa::kAvx2:
      return avx2::kAttentionKernels;
    case Isa::kAvx512:
      return avx512::kAttentionKernels;
    case Isa::kAvx512Bf16:
      return params.type == ElementType::kBFloat16 ? avx512_bf16::kAttentionKernels
                                                   : avx512::kAttentionKernels;
#endif
    default:
      throw std::runtime_error(std::string("no CPU attention for ") + isa_name(active_isa()));
  }
}

constexpr int64_t kCacheLine = 64;

struct AlignedDelete {
  void operator()(unsigned char* memory) const {
    ::operator delete(memory, std::align_val_t{kCacheLine});
  }
};
using AlignedBytes = std::unique_ptr<unsigned char[], AlignedDelete>;

AlignedBytes allocate(int64_t bytes) {
  return AlignedBytes(static_cast<unsigned char*>(
      ::operator new(static_cast<size_t>(bytes), std::align_val_t{kCacheLine})));
}

// Hands out the parts of one worker's scratch; with a null base it only counts.
class Carver {
 public:
  explicit Carver(unsigned char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kCacheLine);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

AttentionScratch carve(Carver& carver, const AttentionPlan& plan, int64_t head_dim,
                       const unsigned char* zeros) {
  const int64_t rows = round_up(plan.max_rows, 16);
  const int64_t keys = plan.packs ? tile_keys(head_dim) : 0;
  AttentionScratch scratch{};
  scratch.query = carver.take<float>(rows * kRowStride);
  scratch.scores = carver.take<float>(rows * kRowStride);
  scratch.output = carver.take<float>(rows * round_up(head_dim, 32));
  scratch.packed_keys = carver.take<float>(keys * round_up(head_dim, 2));
  scratch.packed_values = carver.take<float>(keys * round_up(head_dim, 32));
  scratch.maximum = carver.take<float>(rows);
  scratch.sum = carver.take<float>(rows);
  scratch.rescale = carver.take<float>(rows);
  scratch.slope = carver.take<float>(rows);
  scratch.position = carver.take<int64_t>(rows);
  scratch.visible_begin = carver.take<int64_t>(rows);
  scratch.visible_end = carver.take<int64_t>(rows);
  scratch.key_rows = carver.take<const void*>(kTileKeys + kPrefetchKeys);
  scratch.value_rows = carver.take<const void*>(kTileKeys + kPrefetchKeys);
  scratch.zeros = zeros;
  return scratch;
}

alignas(kCacheLine) constexpr unsigned char kZeroRow[kRowStride * sizeof(float)] = {};

}  // namespace

void launch_paged_attention(const PagedAttentionParams& params, const ThreadPool& pool) {
  if (params.num_tokens == 0 || params.num_seqs == 0) return;
  const AttentionKernels& kernels = kernels_for(params);
  const AttentionPlan plan = plan_attention(params, pool.num_threads);
  const auto num_tasks = static_cast<int64_t>(plan.tasks.size());
  if (num_tasks == 0) return;

  // The caller's workspace holds the states when it is large enough. Its formula, which counts what
  // a GPU needs, promises that for num_splits n > 1; the automatic cut may leave more states, and
  // so does a prefix group when each of its sequences has one piece.
  const int64_t state_bytes = plan.num_states * partial_state_bytes(params.cache.head_dim);
  AlignedBytes own_states;
  if (state_bytes > params.workspace_bytes) own_states = allocate(state_bytes);
  float* states =
      static_cast<float*>(own_states ? static_cast<void*>(own_states.get()) : params.workspace);

  const int64_t num_workers = std::min(pool.num_threads, num_tasks);
  Carver counter(nullptr);
  carve(counter, plan, params.cache.head_dim, kZeroRow);
  const int64_t scratch_bytes = counter.used();
  const AlignedBytes scratch_memory = allocate(num_workers * scratch_bytes);

  std::atomic<int64_t> next_task{0};
  parallel_for(pool, 0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Carver carver(scratch_memory.get() + worker * scratch_bytes);
      const AttentionScratch scratch = carve(carver, plan, params.cache.head_dim, kZeroRow);
      for (int64_t i = next_task++; i < num_tasks; i = next_task++) {
        kernels.attend(params, plan.tasks[static_cast<size_t>(i)], scratch, states);
      }
    }
  });
  parallel_for(pool, 0, static_cast<int64_t>(plan.merges.size()), 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   kernels.merge(params, plan.merges[static_cast<size_t>(i)], states);
                 }
               });
}

}  // namespace pagedkv::cpu
