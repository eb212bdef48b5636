// main() of the unit checks: runs all, those that --filter names (a name, or a prefix ending in *),
// or lists them.

#include <cstring>
#include <exception>

#include "check.h"

namespace {

bool is_wanted(const std::string& name, const std::string& filter) {
  if (!filter.empty() && filter.back() == '*')
    return name.starts_with(filter.substr(0, filter.size() - 1));
  return filter.empty() || name == filter;
}

bool passes(const check::Check& one) {
  const int num_before = check::num_failures();
  try {
    one.body();
  } catch (const check::Abandoned&) {
    // Its failure is counted.
  } catch (const std::exception& error) {
    check::fail(one.name.c_str(), 0, std::string("an exception came out: ") + error.what());
  }
  const bool is_good = check::num_failures() == num_before;
  std::cout << (is_good ? "ok     " : "FAILED ") << one.name << std::endl;
  return is_good;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  std::string filter;
  for (int i = 1; i < num_arguments; ++i) {
    if (std::strcmp(arguments[i], "--list") == 0) {
      for (const check::Check& one : check::registry()) std::cout << one.name << "\n";
      return 0;
    }
    if (std::strcmp(arguments[i], "--filter") != 0 || i + 1 == num_arguments) {
      std::cerr << "usage: " << arguments[0] << " [--list] [--filter NAME|PREFIX*]\n";
      return 2;
    }
    filter = arguments[++i];
  }
  int num_run = 0;
  int num_failed = 0;
  for (const check::Check& one : check::registry()) {
    if (!is_wanted(one.name, filter)) continue;
    ++num_run;
    num_failed += !passes(one);
  }
  if (num_run == 0) {
    std::cerr << "no check is named " << filter << "\n";
    return 2;
  }
  if (num_run > 1) std::cout << num_run - num_failed << " of " << num_run << " checks passed\n";
  return num_failed == 0 ? 0 : 1;
}
