// Unit checks in one header: TEST(Suite, behaviour) { ... } registers a check; EXPECT_* records a
// failure and goes on, ASSERT_* ends the check. Both show the two values. main() (check_main.cpp)
// knows --list and --filter PATTERN.
//
// In the manner of GoogleTest, small enough to need no installation.

#pragma once

#include <concepts>
#include <functional>
#include <iostream>
#include <iterator>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Check {
  std::string name;  // Suite.behaviour
  std::function<void()> body;
};

// In the order of registration. Function-local, so that no check registers before the list exists.
inline std::vector<Check>& registry() {
  static std::vector<Check> checks;
  return checks;
}

inline int& num_failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* suite, const char* name, std::function<void()> body) {
    registry().push_back({std::string(suite) + "." + name, std::move(body)});
  }
};

// What ASSERT_* throws to leave a check.
struct Abandoned {};

template <class T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (Printable<T>) {
    out << value;
  } else if constexpr (requires { value.has_value(); }) {
    out << (value ? show(*value) : "none");
  } else if constexpr (requires { value.source; }) {
    out << value.source << "->" << value.destination;
  } else if constexpr (requires { std::begin(value); }) {
    constexpr int kMaxShown = 32;
    int num_shown = 0;
    out << "[";
    for (const auto& item : value) {
      if (num_shown == kMaxShown) out << ", ...";
      if (num_shown++ >= kMaxShown) break;
      out << (num_shown > 1 ? ", " : "") << show(item);
    }
    out << "]";
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

inline void fail(const char* file, int line, const std::string& what) {
  ++num_failures();
  std::cout << file << ":" << line << ": " << what << "\n";
}

// Integers of different signedness compare by value.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (std::integral<A> && std::integral<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}
template <class A, class B>
bool less(const A& a, const B& b) {
  if constexpr (std::integral<A> && std::integral<B>) {
    return std::cmp_less(a, b);
  } else {
    return a < b;
  }
}

// The comparisons behind the macros. Functions, so that each operand is evaluated once.
template <class A, class B>
bool report(bool holds, const A& a, const B& b, const char* text, const char* file, int line) {
  if (!holds) fail(file, line, std::string(text) + ", with " + show(a) + " and " + show(b));
  return holds;
}
template <class A, class B>
bool expect_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  return report(equal(a, b), a, b, text, file, line);
}
template <class A, class B>
bool expect_ne(const A& a, const B& b, const char* text, const char* file, int line) {
  return report(!equal(a, b), a, b, text, file, line);
}
template <class A, class B>
bool expect_lt(const A& a, const B& b, const char* text, const char* file, int line) {
  return report(less(a, b), a, b, text, file, line);
}
template <class A, class B>
bool expect_le(const A& a, const B& b, const char* text, const char* file, int line) {
  return report(!less(b, a), a, b, text, file, line);
}

// Whether body throws Error with a message that contains part.
template <class Error, class Body>
bool throws(Body body, const std::string& part, const char* text, const char* file, int line) {
  try {
    body();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return true;
    fail(file, line,
         std::string(text) + " says \"" + error.what() + "\", expected \"" + part + "\" in it");
    return false;
  } catch (const std::exception& error) {
    fail(file, line, std::string(text) + " throws another error: " + error.what());
    return false;
  }
  fail(file, line, std::string(text) + " throws nothing");
  return false;
}

}  // namespace check

#define TEST(suite, name)                                                                        \
  static void suite##_##name();                                                                  \
  static const check::Registration registration_##suite##_##name(#suite, #name, suite##_##name); \
  static void suite##_##name()

#define EXPECT_EQ(a, b) check::expect_eq(a, b, #a " == " #b, __FILE__, __LINE__)
#define EXPECT_NE(a, b) check::expect_ne(a, b, #a " != " #b, __FILE__, __LINE__)
#define EXPECT_LT(a, b) check::expect_lt(a, b, #a " < " #b, __FILE__, __LINE__)
#define EXPECT_LE(a, b) check::expect_le(a, b, #a " <= " #b, __FILE__, __LINE__)
#define EXPECT_TRUE(a) check::expect_eq(static_cast<bool>(a), true, #a, __FILE__, __LINE__)
#define EXPECT_FALSE(a) check::expect_eq(static_cast<bool>(a), false, #a, __FILE__, __LINE__)
#define EXPECT_THROW(statement, Error, part) \
  check::throws<Error>([&] { statement; }, part, #statement, __FILE__, __LINE__)
#define ASSERT_EQ(a, b) \
  if (!EXPECT_EQ(a, b)) throw check::Abandoned()
#define ASSERT_TRUE(a) \
  if (!EXPECT_TRUE(a)) throw check::Abandoned()
