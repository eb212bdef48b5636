// streamed_linear of 5 to 128 rows: a matrix product whose time is that of reading the weights.
//
// Grid: clusters, a block a multiprocessor, each cluster with about equally many columns of y, each
// of its blocks with a part of the rows' length: a block then reads many rows of weights for every
// row of the input, which all have to read. Weights stream from before this kernel's wait for the
// one before it, as those of few rows do. At the end the blocks of a cluster add their sums, read
// from each other's shared memory always in the same order: a row's result has the same bits
// whatever rows stand beside it.
//
// Must move: N * K elements of weights; and from the L2, T * K of the input for each cluster.
#pragma once

#include "cuda/linear/cluster_result.cuh"

namespace pagedkv::cuda {

template <class T, int kRows>
__global__ void __launch_bounds__(ClusterTraits::kRegisterThreads)
    cluster_linear_kernel(const __grid_constant__ StreamedLinearParams params,
                          const __grid_constant__ ClusterSetup setup) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = ClusterTraits;
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t barriers[2][Traits::kMaxStages];
  const ClusterRing<kRows> ring{shared_address(memory), shared_address(barriers[0]),
                                shared_address(barriers[1]), setup.pass_rows()};
  if (threadIdx.x == Traits::kThreads) ring.init(setup.stages);
  __syncthreads();
  // Who starts early reads nothing but weights before its own wait.
  allow_next_kernel();
  const int rank = setup.blocks > 1 ? cluster_rank() : 0;
  const ClusterPart part(setup, rank, ClusterStep<kRows>::kSlabs);
  if (threadIdx.x >= Traits::kThreads) {
    if (threadIdx.x == Traits::kThreads) ClusterFeed<kRows>(setup, part, ring).run();
    return;
  }
  wait_previous_kernel();
  ClusterMultiplier<T, kRows> multiplier(setup, part, ring);
  ClusterSums<kRows> sums;
  if (setup.blocks == 1) {
    const OwnResult<T, kRows> result(params, setup, memory + setup.results);
#pragma unroll 1
    for (int pass = 0; pass < part.passes; ++pass) {
      multiplier.multiply_pass(sums);
      result.store(sums, part.first_group + pass * setup.pass_groups);
    }
    return;
  }
  multiplier.multiply_pass(sums);
  sync_threads(1, Traits::kThreads);  // nobody reads the ring any more: the sums go there
  const int pitch = cluster_sums_pitch(setup.pass_rows());
  multiplier.store(sums, reinterpret_cast<float*>(memory), pitch);
  sync_cluster();
  SharedResult<T>(params, setup, part.first_group, shared_address(memory), pitch).store();
  meet_cluster();  // the other may still be reading
#else
  __trap();  // launch_cluster_linear does not come here
#endif
}

}  // namespace pagedkv::cuda
