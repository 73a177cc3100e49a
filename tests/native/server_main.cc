// The command line of the tests of whole jobs: the server, the kernels, which test, and `moved`: where the server would be
// killed, the job moves to another device instead.
#include <cstdio>
#include <string>

#include "server_mover.h"

int main(int argc, char** argv) {
  using namespace harness;
  const bool moved = argc == 5 && std::string(argv[4]) == "moved";
  if ((argc != 4 && !moved) || !tests().contains(argv[3])) {
    std::fprintf(stderr, "usage: %s XMIG-SERVER KERNELS TEST [moved]\n", argv[0]);
    return 2;
  }
  if (moved) instead_of_kill = move_away;
  setup = {argv[1], argv[2]};
  tests().at(argv[3])();
  return 0;
}
