// Reading 32 values of a row as files hold them.
#pragma once

#include "pack/pack.h"
#include "pack/round.h"

namespace smollm2 {

// Values 32 group ... 32 group + 31 of a row as floats, zeros from the row's end on.
void read_floats(const Rows& rows, int row, int group, float* out);

// The same group as it is stored; only for kinds of groups.
Group read_group(const Rows& rows, int row, int group);

}  // namespace smollm2
