// The launch of streamed_linear in clusters: how many blocks share a row. Instantiations: 2 types x
// 5 numbers of rows.
#include <algorithm>

#include "cuda/device/overlapped_launch.cuh"
#include "cuda/linear/bits_map.h"
#include "cuda/linear/cluster_linear.h"
#include "cuda/linear/cluster_linear_kernel.cuh"

namespace pagedkv::cuda {
namespace {

using Traits = ClusterTraits;

// One block a multiprocessor, as for few rows; a norm's block finds room beside it.
constexpr int64_t kSharedBytes = 224 * 1024;
constexpr int kMaxTokens = 128;
constexpr int64_t kStages = 3;  // of the ring, at least

int group_rows(const StreamedLinearParams& params) {
  return params.epilogue == LinearEpilogue::kSiluAndMul ? 16 : 8;
}

CUtensorMap weight_map(const StreamedLinearParams& params, const ClusterSetup& setup,
                       int step_slabs) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.weight_stride_row) * 2;
  const auto half_rows = static_cast<cuuint64_t>(params.out_features / 2);
  const cuuint64_t halves = setup.gated() ? 2 : 1;
  const cuuint64_t sizes[] = {Traits::kSlab, 8,
                              static_cast<cuuint64_t>(params.in_features / Traits::kSlab), halves,
                              static_cast<cuuint64_t>(setup.groups)};
  const cuuint64_t strides[] = {row_bytes, Traits::kSlabRowBytes, row_bytes * half_rows,
                                row_bytes * 8};
  const cuuint32_t box[] = {Traits::kSlab, 8, static_cast<cuuint32_t>(step_slabs),
                            static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(setup.pass_groups)};
  return bits_map("weights", params.weight, sizes, strides, box);
}

CUtensorMap input_map(const StreamedLinearParams& params, int rows, int step_slabs) {
  const cuuint64_t sizes[] = {Traits::kSlab, static_cast<cuuint64_t>(params.num_tokens),
                              static_cast<cuuint64_t>(params.in_features / Traits::kSlab)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.input_stride_token) * 2,
                                Traits::kSlabRowBytes};
  const cuuint32_t box[] = {Traits::kSlab, static_cast<cuuint32_t>(rows),
                            static_cast<cuuint32_t>(step_slabs)};
  return bits_map("input", params.input, sizes, strides, box);
}

// How a product is shared out.
struct ClusterPlan {
  int blocks;  // of a cluster
  int pass_groups;
  int passes;  // of a cluster, at most
};

// What the products of the last tile may read behind the ring: 7 groups, but for the input.
template <int kRows>
constexpr int64_t kBytesBehind = std::max(0, 7 * 8 - kRows) * ClusterStep<kRows>::kRowBytes;

// A block's own results. Between passes the ring goes on, and they lie behind it.
template <int kRows>
int64_t result_bytes(const ClusterPlan& plan) {
  return int64_t{kRows} * own_result_pitch(plan.pass_groups) * 2;
}

template <int kRows>
int64_t behind_ring(const ClusterPlan& plan) {
  return std::max(kBytesBehind<kRows>, plan.passes > 1 ? result_bytes<kRows>(plan) : 0);
}

template <int kRows>
int64_t stages_of(const ClusterPlan& plan, int64_t group_rows) {
  const int64_t stage_bytes =
      (plan.pass_groups * group_rows + kRows) * ClusterStep<kRows>::kRowBytes;
  return std::min<int64_t>((kSharedBytes - behind_ring<kRows>(plan)) / stage_bytes,
                           Traits::kMaxStages);
}

// Two blocks a cluster, each with half of the rows' length and so half of the input, unless a
// pass's rows would leave too few stages. More are slower: clusters of four and eight leave
// multiprocessors idle. The choice must not depend on the number of tokens, as the sums' order
// does on it: 64 leave the fewest stages.
template <int kRows>
ClusterPlan plan_clusters(int64_t groups, int64_t group_rows) {
  const int64_t multiprocessors = num_multiprocessors();
  const ClusterPlan in_pairs{
      .blocks = 2,
      .pass_groups = static_cast<int>(ceil_div(groups, std::max<int64_t>(1, multiprocessors / 2))),
      .passes = 1};
  if (multiprocessors > 1 && stages_of<64>(in_pairs, group_rows) >= kStages) return in_pairs;
  const int64_t of_block = ceil_div(groups, multiprocessors);
  for (int64_t passes = 1;; ++passes) {
    const ClusterPlan alone{.blocks = 1,
                            .pass_groups = static_cast<int>(ceil_div(of_block, passes)),
                            .passes = static_cast<int>(passes)};
    if (alone.pass_groups * group_rows <= Traits::kMaxRows &&
        stages_of<kRows>(alone, group_rows) >= kStages) {
      return alone;
    }
  }
}

template <class T, int kRows>
void launch_rows(const StreamedLinearParams& params, cudaStream_t stream) {
  const auto kernel = cluster_linear_kernel<T, kRows>;
  ClusterSetup setup{};
  setup.group_rows = group_rows(params);
  setup.groups = static_cast<int>(params.out_features / setup.group_rows);
  const ClusterPlan plan = plan_clusters<kRows>(setup.groups, setup.group_rows);
  setup.pass_groups = plan.pass_groups;
  setup.passes = plan.passes;
  setup.blocks = plan.blocks;
  setup.weight = weight_map(params, setup, ClusterStep<kRows>::kSlabs);
  setup.input = input_map(params, kRows, ClusterStep<kRows>::kSlabs);
  setup.slabs = static_cast<int>(params.in_features / Traits::kSlab);
  setup.wide = aligned_to(8, {params.out}, {params.out_stride_token * 2});
  setup.whole = aligned_to(16, {params.out}, {params.out_stride_token * 2});
  setup.stages = static_cast<int>(std::min<int64_t>(stages_of<kRows>(plan, setup.group_rows),
                                                    int64_t{setup.slabs} * plan.passes));
  const int64_t ring = int64_t{setup.stages} * ClusterRing<kRows>::stage_bytes(setup.pass_rows());
  setup.results = plan.passes > 1 ? static_cast<int>(ring) : 0;
  const int64_t results = plan.blocks > 1
                              ? int64_t{kRows} * cluster_sums_pitch(setup.pass_rows()) * 4
                              : setup.results + result_bytes<kRows>(plan);
  // The limit is the kernel's, not the launch's: what one thread needs, another must not lower.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kSharedBytes)),
             "streamed_linear: shared memory");
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(plan.blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      grid_size(ceil_div(setup.groups, int64_t{plan.pass_groups} * plan.passes) * plan.blocks);
  config.blockDim = Traits::kAllThreads;
  config.dynamicSmemBytes = static_cast<size_t>(std::max(ring + kBytesBehind<kRows>, results));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kernels_wait_inside(current_device()) ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params, setup), "streamed_linear");
}

// Whether the code that this device runs is that of 9.0a: the kernel's barriers are shared memory.
bool has_clusters() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, current_device()) != 9) return false;
  cudaFuncAttributes compiled{};
  check_cuda(cudaFuncGetAttributes(&compiled, cluster_linear_kernel<__half, 32>),
             "streamed_linear: attributes");
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
  const auto fixed = static_cast<int64_t>(compiled.sharedSizeBytes);
  return fixed > 0 && most >= kSharedBytes + fixed;
}

}  // namespace

bool can_cluster_linear(const StreamedLinearParams& params) {
  return params.num_tokens <= kMaxTokens && element_bytes(params.type) == 2 &&
         params.norm_weight == nullptr && params.in_features % Traits::kSlab == 0 &&
         params.in_features < INT32_MAX / 4 && params.out_features < INT32_MAX / 4 &&
         params.out_features % group_rows(params) == 0 &&
         aligned_to(16, {params.input, params.weight},
                    {params.input_stride_token * 2, params.weight_stride_row * 2}) &&
         has_clusters();
}

void launch_cluster_linear(const StreamedLinearParams& params, cudaStream_t stream) {
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (params.num_tokens <= 16) return launch_rows<T, 16>(params, stream);
      if (params.num_tokens <= 32) return launch_rows<T, 32>(params, stream);
      if (params.num_tokens <= 64) return launch_rows<T, 64>(params, stream);
      if (params.num_tokens <= 96) return launch_rows<T, 96>(params, stream);
      launch_rows<T, kMaxTokens>(params, stream);
    }
  });
}

}  // namespace pagedkv::cuda
