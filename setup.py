"""Compiles the CPU kernels where there is a C++ compiler; the package works without them."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # A plain C library, loaded with ctypes: it needs neither Python.h nor torch. Threads are
        # those of the OpenMP library that torch has loaded by then, so none is linked.
        Extension(
            "graphattn._cpu",
            ["graphattn/backends/cpu.cpp"],
            depends=["graphattn/backends/cpu_vectors.hpp", "graphattn/backends/cpu_passes.hpp"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
