// How long this thread runs before another one that wants its core does.
#pragma once

namespace smollm2 {

// Asks the scheduler for short turns, once for each thread. A thread keeps its share of a busy
// core, but runs at once when it wakes up: with turns of the usual length, two threads that wait
// for one another each miss the other's turn, and come to a twentieth of their speed beside two
// busy processes. Needs Linux 6.12; does nothing elsewhere.
void ask_for_short_turns();

}  // namespace smollm2
