// Each area of the extension binds itself.
#pragma once

#include <nanobind/nanobind.h>

namespace smollm2 {

void bind_kernels(nanobind::module_& m);    // the tables, for tests
void bind_pack(nanobind::module_& m);       // packing and quantizing weights
void bind_attention(nanobind::module_& m);  // the KV cache's kernels, for tests
void bind_engine(nanobind::module_& m);     // cache, forward
void bind_runtime(nanobind::module_& m);    // threads, memory, limits of the machine

}  // namespace smollm2
