#include "store/held.h"

#include <poll.h>

#include <iterator>
#include <utility>

namespace xmig::store {

void Held::keep(const std::string& name, const std::string& process, ipc::UniqueFd fd) {
  if (!process.empty()) ++programs_[process].holds;  // first: a program without descriptors is forgotten, its pidfd with it
  drop(name);
  descriptors_.emplace(name, Descriptor{next_++, process, std::move(fd)});
}

void Held::drop(const std::string& name) {
  const auto found = descriptors_.find(name);
  if (found == descriptors_.end()) return;
  const std::string process = std::move(found->second.process);
  descriptors_.erase(found);
  left(process);
}

void Held::watch(const std::string& process, ipc::UniqueFd pidfd) { programs_[process].pidfd = std::move(pidfd); }

std::vector<int> Held::watched() const {
  std::vector<int> pidfds;
  for (const auto& [process, program] : programs_)
    if (program.pidfd) pidfds.push_back(program.pidfd.get());
  return pidfds;
}

bool Held::forget_the_exited() {
  for (auto program = programs_.begin(); program != programs_.end();) {
    // One that nobody can watch is not waited for.
    pollfd one{program->second.pidfd.get(), POLLIN, 0};
    const bool lives = program->second.pidfd && program->second.holds != 0 && ::poll(&one, 1, 0) == 0;
    if (lives) {
      ++program;
      continue;
    }
    std::erase_if(descriptors_, [&](const auto& each) { return each.second.process == program->first; });
    program = programs_.erase(program);
  }
  return !programs_.empty();
}

void Held::left(const std::string& process) {
  const auto program = programs_.find(process);
  if (program != programs_.end() && --program->second.holds == 0) programs_.erase(program);
}

}  // namespace xmig::store
