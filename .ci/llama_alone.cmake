# Read at llama.cpp's project(): llama-cpp-python would force the library of its command line tools on, half of the build.
set(LLAMA_BUILD_COMMON OFF)
