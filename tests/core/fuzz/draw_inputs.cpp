// Where there is no libFuzzer, this draws the inputs: core_fuzz [--runs N] [--seed S]. A failing
// input's seed is printed and replays alone by --runs 1 --seed S.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int num_arguments, char** arguments) {
  std::uint64_t num_runs = 1000;
  std::uint64_t seed = 0;
  for (int i = 1; i < num_arguments; i += 2) {
    const bool is_runs = std::strcmp(arguments[i], "--runs") == 0;
    if (i + 1 == num_arguments || (!is_runs && std::strcmp(arguments[i], "--seed") != 0)) {
      std::fprintf(stderr, "usage: %s [--runs N] [--seed S]\n", arguments[0]);
      return 2;
    }
    (is_runs ? num_runs : seed) = std::strtoull(arguments[i + 1], nullptr, 10);
  }
  for (std::uint64_t run = 0; run < num_runs; ++run) {
    std::mt19937_64 random(seed + run);
    std::vector<std::uint8_t> input(600);
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    try {
      LLVMFuzzerTestOneInput(input.data(), input.size());
    } catch (const std::exception& error) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed + run), error.what());
      return 1;
    }
  }
  std::printf("%llu inputs, no finding\n", static_cast<unsigned long long>(num_runs));
  return 0;
}
