"""The program of the C++ checks itself: it lists what the files hold, filters, and fails when a
check fails. And what ships beside it: the fuzzer, the installed package, the example."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from core_program import BUILD, ROOT, build, build_lock, run


@pytest.fixture(scope="module")
def program() -> Path:
    return build("core_checks")


def test_every_check_in_the_files_is_in_the_program(program: Path) -> None:
    written = {
        line.removeprefix("TEST(").split(")")[0].replace(", ", ".")
        for path in (ROOT / "tests" / "core").glob("*_checks.cpp")
        for line in path.read_text().splitlines()
        if line.startswith("TEST(")
    }
    listed = run(program, "--list").split()
    assert len(listed) == len(set(listed))
    assert set(listed) == written


def test_a_filter_runs_one_check_or_a_prefix(program: Path) -> None:
    one = "SipHash128.equals_the_authors_vectors"
    assert run(program, "--filter", one) == f"ok     {one}\n"
    assert "3 of 3 checks passed" in run(program, "--filter", "SipHash128.*")


@pytest.mark.parametrize("arguments", [["--filter", "No.such"], ["--filter"], ["--what"]])
def test_a_filter_without_a_check_and_unknown_options_are_errors(
    program: Path, arguments: list[str]
) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr


def test_a_failing_check_shows_both_values_and_fails_the_program(tmp_path: Path) -> None:
    source = tmp_path / "failing.cpp"
    source.write_text(
        '#include "check.h"\n'
        "TEST(Broken, counts) { int calls = 0; EXPECT_EQ(++calls, 2); ASSERT_EQ(calls, 3);"
        " EXPECT_EQ(0, 9); }\n"
        'TEST(Broken, throws) { EXPECT_THROW((void)0, std::exception, ""); }\n'
        'TEST(Broken, leaks) { throw std::runtime_error("out"); }\n'
        "TEST(Whole, passes) { EXPECT_LT(-1, 0u); }\n"
    )
    program = tmp_path / "failing"
    folder = ROOT / "tests" / "core"
    run("c++", "-std=c++20", f"-I{folder}", source, folder / "check_main.cpp", "-o", program)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "++calls == 2, with 1 and 2" in done.stdout
    assert "calls == 3, with 1 and 3" in done.stdout
    assert "0 == 9" not in done.stdout  # ASSERT ends the check
    assert "throws nothing" in done.stdout
    assert "an exception came out: out" in done.stdout
    assert "ok     Whole.passes" in done.stdout
    assert "1 of 4 checks passed" in done.stdout


def test_two_processes_hash_the_same_tokens_differently(tmp_path: Path) -> None:
    """Without a configured secret nobody outside can tell which prompts collide."""
    source = tmp_path / "key.cpp"
    source.write_text(
        "#include <cstdio>\n"
        '#include "pagedkv/core/prefix_cache.h"\n'
        "int main() {\n"
        "  pagedkv::PrefixCache cache(1, 4, std::nullopt, 128);\n"
        "  const pagedkv::TokenId tokens[4] = {1, 2, 3, 4};\n"
        "  pagedkv::PrefixCache::Run run;\n"
        '  cache.prepare(cache.acquire_root(""), tokens, 1, run);\n'
        '  std::printf("%llx", static_cast<unsigned long long>(run.keys[0].low));\n'
        "}\n"
    )
    library = build("pagedkv_core").parent / "libpagedkv_core.a"
    program = tmp_path / "key"
    run("c++", "-std=c++20", f"-I{ROOT / 'include'}", source, library, "-o", program)
    assert run(program) != run(program)


def test_the_fuzzer_finds_nothing() -> None:
    assert "1500 inputs, no finding" in run(build("core_fuzz"), "--runs", "1500")


def test_the_installed_package_serves_a_program_of_its_own(tmp_path: Path) -> None:
    build("pagedkv_core")
    with build_lock():
        build_all = ["-DPAGEDKV_TESTS=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
        run("cmake", "-S", ROOT, "-B", BUILD / "package", "-G", "Ninja", *build_all)
        run("cmake", "--build", BUILD / "package")
    run("cmake", "--install", BUILD / "package", "--prefix", tmp_path / "prefix")
    example = tmp_path / "example"
    run("cmake", "-S", ROOT / "examples" / "cpp_core", "-B", example, "-G", "Ninja",
        f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")  # fmt: skip
    run("cmake", "--build", example)
    shown = run(example / "share_a_prompt")
    assert "copy block 1 to block 2\n" in shown
    assert "the step writes slots 10 and 6\n" in shown
    assert "4 tokens of the same prompt would be cached\n" in shown


@pytest.mark.parametrize(
    ("value", "message"),
    [("memory", "supported are address"), ("address,thread", "exclude each other")],
)
def test_an_unknown_sanitizer_is_refused(tmp_path: Path, value: str, message: str) -> None:
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, f"-DPAGEDKV_SANITIZE={value}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
