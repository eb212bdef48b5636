// The secret of the block hash: one per process, unlike that of any other process, unless
// configured. The check runs its own program again to see what another process would say.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::tokens;

// The hash of the first block of one prompt, as this process's managers make it.
std::string hash_of_a_prompt(std::optional<std::string> secret) {
  BlockManager manager({.num_blocks = 2, .block_size = 4, .hash_secret = std::move(secret)});
  testing::prefill(manager, 0, tokens(4));
  const auto key = TestAccess::entry(TestAccess::cache(manager), 0).key;
  std::ostringstream text;
  text << key.low << ' ' << key.high;
  return text.str();
}

// Of a new process that runs this program, which sees the variable and says its hash.
constexpr const char* kAskForHash = "PAGEDKV_CHECKS_SAY_HASH";

std::string hash_of_another_process(const std::string& secret) {
  char program[4096] = {};
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) return "no /proc/self/exe";
  const std::string command =
      std::string(kAskForHash) + "='" + secret + "' '" + program +
      "' --filter HashSecret.nobody_can_predict_the_hashes_of_another_process";
  FILE* pipe = popen(command.c_str(), "r");
  std::string said;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) said += static_cast<char>(c);
  pclose(pipe);
  const std::size_t begin = said.find("hash: ");
  return begin == std::string::npos ? said : said.substr(begin, said.find('\n', begin) - begin);
}

TEST(HashSecret, nobody_can_predict_the_hashes_of_another_process) {
  if (const char* asked = std::getenv(kAskForHash)) {
    const std::string secret = asked;
    std::printf("hash: %s\n",
                hash_of_a_prompt(secret.empty() ? std::nullopt : std::optional(secret)).c_str());
    return;
  }
  const std::string ours = "hash: " + hash_of_a_prompt(std::nullopt);
  EXPECT_EQ(ours, "hash: " + hash_of_a_prompt(std::nullopt));  // one secret for a process
  const std::string first = hash_of_another_process("");
  const std::string second = hash_of_another_process("");
  EXPECT_EQ(first.find("hash: "), std::size_t{0});
  EXPECT_NE(first, ours);
  EXPECT_NE(first, second);
  // A configured secret makes them agree.
  EXPECT_EQ(hash_of_another_process("sixteen bytes of"),
            hash_of_another_process("sixteen bytes of"));
  EXPECT_NE(hash_of_a_prompt("sixteen bytes of"), hash_of_a_prompt("seventeen bytes o"));
}

}  // namespace
}  // namespace pagedkv
