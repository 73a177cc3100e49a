// What this process asks of the driver, for tests: with XMIG_REQUESTED, the name of a file, in its environment, each fact is
// a line of that file (docs/coverage.md says which). Written at once, each with one write to a file that is opened for
// it: several processes may name the same file, and any may end at any moment.
#pragma once

#include <cuda.h>

namespace xmig::client {

bool requested_wanted();  // XMIG_REQUESTED is set

void note_called(int slot);  // one of kNativeNames; the first time only
void note_refused(const char* name);
void note_missing(const char* name);
void note_missing_table(const char (&uuid)[16]);

}  // namespace xmig::client
