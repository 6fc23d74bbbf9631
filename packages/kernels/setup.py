"""Build the shared library with the C++ compiler of this machine: `python setup.py build_ext`
without an installation. CXXFLAGS adds options, such as those of sanitizers.
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("source")
LIBRARY = "libposenc_kernels"
# Without -ffast-math: as an option of a shared library, it makes the whole process flush subnormal
# numbers to zero. Without -march=native: dispatch.cpp chooses the instruction set at run time.
OPTIONS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
OPTIONS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-g0"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# g++ must add each product to its sum at once: else it keeps more products than it has registers.
# Other compilers do not know these options.
PRODUCT = ["-fno-tree-reassoc", "-fno-tree-ter"]
SETS = {"attention_plain": [], "product_plain": PRODUCT}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS |= {"attention_avx2": AVX2, "attention_avx512": [*AVX512, "-mprefer-vector-width=512"]}
    SETS |= {"product_avx2": [*AVX2, *PRODUCT]}
    SETS |= {"product_avx512": [*AVX512, "-mavx512vnni", *PRODUCT]}
elif platform.machine().lower() in ("aarch64", "arm64"):
    SETS |= {"product_dotprod": ["-march=armv8.2-a+dotprod", *PRODUCT]}
PLAIN = ("operator", "node", "work", "product", "product_weights", "dispatch")
FILES = {**{name: [] for name in PLAIN}, **SETS}


class BuildLibrary(build_ext):
    """Compiles each file with the options of its instruction set, in parallel, and links them."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        extra = os.environ.get("CXXFLAGS", "").split()
        command = [*self.compiler.compiler_so[:1], "-dM", "-E", "-xc++", os.devnull]
        macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        unknown = PRODUCT if "__clang__" in macros else []

        def compiled(name: str) -> list[str]:
            return self.compiler.compile(
                [str(SOURCE / f"{name}.cpp")],
                output_dir=self.build_temp,
                extra_postargs=[*OPTIONS, *(o for o in FILES[name] if o not in unknown), *extra],
                depends=ext.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [path for paths in pool.map(compiled, FILES) for path in paths]
        path = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects, path, extra_postargs=extra, target_lang="c++", build_temp=self.build_temp
        )


class WheelForAnyPython(bdist_wheel):
    """The library depends on the platform, but not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"posenc_export_kernels.{LIBRARY}",
            [str(SOURCE / f"{name}.cpp") for name in FILES],
            depends=[str(path) for path in sorted(SOURCE.glob("*.h"))],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForAnyPython},
)
