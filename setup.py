"""Builds the optional extension; everything else is in pyproject.toml."""

import sys
from glob import glob

from setuptools import Extension, setup

if sys.platform == "win32":
    compile_args = ["/std:c++17"]
else:
    compile_args = ["-std=c++17", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]

extension = Extension(
    "torch_scan_hop._C",
    sources=sorted(glob("csrc/*.cpp")),
    depends=sorted(glob("csrc/*.h")),
    language="c++",
    extra_compile_args=compile_args,
    py_limited_api=True,  # csrc/python.cpp says which
    optional=True,  # only XLA needs it: no compiler must not mean no package
)

setup(ext_modules=[extension], options={"bdist_wheel": {"py_limited_api": "cp310"}})
