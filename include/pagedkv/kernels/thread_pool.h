// How CPU kernels run in parallel without knowing torch: a borrowed pair of functions, filled by
// the adapters with torch's own pool. Bodies must not throw: whatever can be refused is refused
// before the loop starts.
#pragma once

#include <cstdint>

namespace pagedkv {

// Calls body(begin, end, context) on disjoint pieces that cover [begin, end).
using RangeBody = void (*)(int64_t begin, int64_t end, void* context);

struct ThreadPool {
  int64_t num_threads;
  // Pieces have at least grain items, as far as there are so many; returns when all are done.
  void (*run)(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context);
};

// parallel_for(pool, 0, n, grain, [&](int64_t begin, int64_t end) { ... });
template <class Body>
void parallel_for(const ThreadPool& pool, int64_t begin, int64_t end, int64_t grain,
                  const Body& body) {
  pool.run(
      begin, end, grain,
      [](int64_t first, int64_t last, void* context) {
        (*static_cast<const Body*>(context))(first, last);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace pagedkv
