#include "server/cuda/objects/placed_variables.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace xmig::server {
namespace {

// What is hashed by itself, and copied if it differs.
constexpr uint64_t kHashedPiece = 64 << 10;
// Of a place: most directories are shorter.
constexpr uint64_t kFirstRead = 64 << 10;
// An address. Of one that the program has changed no half may become the next server's.
constexpr size_t kAddressWord = 8;

// What is still as it was `before` becomes what is there `instead`, word by word.
void put_unchanged(std::span<std::byte> now, std::span<const std::byte> before, std::span<const std::byte> instead) {
  for (size_t at = 0; at < now.size(); at += kAddressWord) {
    const size_t bytes = std::min(kAddressWord, now.size() - at);
    if (std::memcmp(now.data() + at, before.data() + at, bytes) == 0) std::memcpy(now.data() + at, instead.data() + at, bytes);
  }
}

void add_move(std::vector<device::Move>& moves, uint64_t to, uint64_t from, uint64_t bytes) {
  if (!moves.empty() && moves.back().to + moves.back().bytes == to && moves.back().from + moves.back().bytes == from) {
    moves.back().bytes += bytes;
  } else {
    moves.push_back({to, from, bytes});
  }
}

Error driver_error(CUresult result) { return {.text = "CUDA error " + std::to_string(result), .number = result}; }

}  // namespace

// --- a module's first kernel

// Which variables there are the image says; how large they are, and where, the driver.
const PlacedVariables::Layout& PlacedVariables::layout(uint32_t index, const Module& module,
                                                       std::span<const std::byte> image) {
  const auto [entry, fresh] = layouts_.try_emplace(index);
  Layout& layout = entry->second;
  if (!fresh) return layout;
  std::vector<device::ImageVariable> found;
  std::string refused;
  if (const Result<> read = device_.placed_variables(module.owner.ordinal, image, found); !read) {
    log_(Level::kWarning, "not all variables of module " + std::to_string(index) + " can be determined from its image: " +
                              read.why() + ". What kernels leave in those that the program does not ask for is lost if its server is");
  }
  contexts_.use(module.owner.ordinal);
  for (device::ImageVariable& variable : found) {
    CUdeviceptr real = 0;
    size_t bytes = 0;
    const CUresult result = driver_.cuModuleGetGlobal_v2(&real, &bytes, module.real, variable.name.c_str());
    if (result != CUDA_SUCCESS || real == 0 || bytes == 0) {
      if (refused.empty()) refused = variable.name + " (CUDA error " + std::to_string(result) + ")";
      continue;
    }
    layout.variables.push_back({std::move(variable.name), bytes, 0, uint64_t{variable.has_addresses}, false});
    layout.real.push_back(real);
  }
  if (!refused.empty() && !std::exchange(reported_refused_, true)) {  // of hundreds of modules the first will do
    log_(Level::kWarning, "the driver does not tell where variables of module " + std::to_string(index) + " are, as " +
                              refused + ". What kernels leave in such ones is lost if the server is");
  }
  if (layout.variables.empty()) return layout;
  layout.bytes = place_variables(layout.variables);
  if (layout.bytes == 0) {
    log_(Level::kWarning, "the variables of module " + std::to_string(index) + " are too many, or too large, to be kept");
  }
  return layout;
}

uint64_t PlacedVariables::bytes_for(uint32_t index, const Module& module, std::span<const std::byte> image) {
  return places_.contains(index) ? 0 : layout(index, module, image).bytes;
}

CUresult PlacedVariables::create(uint32_t index, const Module& module, std::span<const std::byte> image, uint64_t address,
                                 uint64_t bytes, CUstream stream) {
  if (places_.contains(index)) return CUDA_ERROR_INVALID_VALUE;
  const Layout& wanted = layout(index, module, image);
  if (wanted.bytes == 0 || wanted.bytes > bytes) return CUDA_ERROR_INVALID_VALUE;
  contexts_.use(module.owner.ordinal);
  Place place{.ordinal = module.owner.ordinal, .address = address, .bytes = bytes};
  for (size_t i = 0; i < wanted.variables.size(); ++i) {
    Variable& variable = place.variables.emplace_back(Variable{.kept = wanted.variables[i], .real = wanted.real[i]});
    if (variable.kept.first == 0) continue;
    variable.first.resize(variable.kept.bytes);
    if (const CUresult result = read(variable.real, variable.first, stream); result != CUDA_SUCCESS) return result;
    variable.original = variable.first;
  }
  if (const CUresult result = write_directory(place, stream); result != CUDA_SUCCESS) return result;
  split_up(place);
  if (!device_.hash_placed(place.ordinal, place.pieces, place.hashes, std::nullopt)) return CUDA_ERROR_UNKNOWN;
  layouts_.erase(index);
  places_.emplace(index, std::move(place));
  return CUDA_SUCCESS;
}

void PlacedVariables::split_up(Place& place) {
  place.pieces.clear();
  for (const Variable& variable : place.variables) {
    for (uint64_t at = 0; at < variable.kept.bytes; at += kHashedPiece) {
      place.pieces.push_back({variable.real + at, std::min(kHashedPiece, variable.kept.bytes - at)});
    }
  }
  place.hashes.resize(place.pieces.size());
}

void PlacedVariables::forget(uint32_t index) {
  layouts_.erase(index);
  places_.erase(index);
}

// --- a snapshot

template <typename F>
bool PlacedVariables::hash(const Where& where, F&& f) {
  std::vector<device::Chunk> pieces;  // of one device: it hashes them at once
  std::vector<uint64_t> hashes;
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    pieces.clear();
    for (const auto& [index, place] : places_) {
      if (place.ordinal == ordinal) pieces.insert(pieces.end(), place.pieces.begin(), place.pieces.end());
    }
    if (pieces.empty()) continue;
    hashes.resize(pieces.size());
    contexts_.use(ordinal);
    if (!device_.hash_placed(ordinal, pieces, hashes, where(ordinal))) return false;
    size_t first = 0;
    for (auto& [index, place] : places_) {
      if (place.ordinal != ordinal) continue;
      if (!f(place, std::span<const uint64_t>(hashes).subspan(first, place.pieces.size()))) return false;
      first += place.pieces.size();
    }
  }
  return true;
}

bool PlacedVariables::learn(const Where& where) {
  return hash(where, [](Place& place, std::span<const uint64_t> hashes) {
    place.hashes.assign(hashes.begin(), hashes.end());
    return true;
  });
}

bool PlacedVariables::keep(const Where& where) {
  std::vector<std::vector<device::Move>> moves(contexts_.count());
  const bool hashed = hash(where, [&](Place& place, std::span<const uint64_t> hashes) {
    if (std::equal(hashes.begin(), hashes.end(), place.hashes.begin(), place.hashes.end())) return true;
    const auto stream = static_cast<CUstream>(where(place.ordinal).value_or(nullptr));
    return keep_changed(place, hashes, stream, moves[place.ordinal]) == CUDA_SUCCESS;
  });
  if (!hashed) return false;
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (moves[ordinal].empty()) continue;
    contexts_.use(ordinal);
    if (!device_.copy(moves[ordinal], where(ordinal))) return false;
  }
  return true;
}

CUresult PlacedVariables::keep_changed(Place& place, std::span<const uint64_t> hashes, CUstream stream,
                                       std::vector<device::Move>& moves) {
  bool first_time = false;
  size_t piece = 0;
  for (Variable& variable : place.variables) {
    const size_t begin = piece;
    piece += (variable.kept.bytes + kHashedPiece - 1) / kHashedPiece;
    const auto here = hashes.subspan(begin, piece - begin);
    if (std::equal(here.begin(), here.end(), place.hashes.begin() + static_cast<ptrdiff_t>(begin))) continue;
    const bool fresh = !std::exchange(variable.kept.written, true);
    first_time |= fresh;
    if (variable.kept.first == 0) {
      for (size_t i = begin; i < piece; ++i) {
        if (!fresh && hashes[i] == place.hashes[i]) continue;
        const uint64_t offset = (i - begin) * kHashedPiece;
        add_move(moves, place.address + variable.kept.content + offset, variable.real + offset, place.pieces[i].bytes);
      }
      continue;
    }
    std::vector<std::byte> now(variable.kept.bytes);
    if (const CUresult result = read(variable.real, now, stream); result != CUDA_SUCCESS) return result;
    put_unchanged(now, variable.first, variable.original);
    CUresult result = write(place.address + variable.kept.content, now, stream);
    if (result == CUDA_SUCCESS && fresh) result = write(place.address + variable.kept.first, variable.original, stream);
    if (result != CUDA_SUCCESS) return result;
  }
  place.hashes.assign(hashes.begin(), hashes.end());
  return first_time ? write_directory(place, stream) : CUDA_SUCCESS;
}

CUresult PlacedVariables::write_directory(const Place& place, CUstream stream) {
  std::vector<KeptVariable> variables;
  variables.reserve(place.variables.size());
  for (const Variable& variable : place.variables) variables.push_back(variable.kept);
  return write(place.address, serialise_variables(variables, place.bytes), stream);
}

// --- a server that has just come

CUresult PlacedVariables::adopt(uint32_t index, const Module& module, uint64_t address, uint64_t bytes) {
  Place place{.ordinal = module.owner.ordinal, .address = address, .bytes = bytes, .adopted = true};
  return places_.emplace(index, std::move(place)).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

Result<> PlacedVariables::restore(const Find& module, const Streams& streams) {
  for (auto& [index, place] : places_) {
    if (!place.adopted) continue;
    contexts_.use(place.ordinal);
    if (const Result<> restored = restore(place, module(index), streams(place.ordinal)); !restored) {
      Error error = restored.error();
      error.text = "what kernels have left in the variables of module " + std::to_string(index) + " cannot be put back: " + error.text;
      return error;
    }
  }
  return {};
}

Result<> PlacedVariables::restore(Place& place, const Module& module, CUstream stream) {
  std::vector<std::byte> directory(std::min(place.bytes, kFirstRead));
  if (const CUresult result = read(place.address, directory, stream); result != CUDA_SUCCESS) return driver_error(result);
  const uint64_t bytes = variable_directory_bytes(directory, place.bytes);
  const bool longer = bytes > directory.size();
  directory.resize(bytes);
  if (longer) {
    if (const CUresult result = read(place.address, directory, stream); result != CUDA_SUCCESS) return driver_error(result);
  }
  const auto kept = parse_variables(directory, place.bytes);
  if (!kept) {
    return Error{.text = "the program has overwritten the memory where they were kept (" + kept.why() + ")",
                 .number = CUDA_ERROR_INVALID_VALUE};
  }
  std::vector<device::Move> moves;
  for (const KeptVariable& one : *kept) {
    Variable variable{.kept = one};
    size_t length = 0;
    const CUresult found = driver_.cuModuleGetGlobal_v2(&variable.real, &length, module.real, one.name.c_str());
    if (found != CUDA_SUCCESS || length != one.bytes) {
      if (!one.written) continue;  // another device's code has no such variable
      return Error{.text = "the variable " + one.name + " is not there any more, or has another size",
                   .number = CUDA_ERROR_NOT_FOUND};
    }
    const uint64_t content = place.address + one.content;
    if (one.first == 0) {
      if (one.written) add_move(moves, variable.real, content, length);
    } else {
      variable.first.resize(length);
      if (const CUresult result = read(variable.real, variable.first, stream); result != CUDA_SUCCESS) return driver_error(result);
      variable.original = variable.first;
    }
    if (one.first != 0 && one.written) {
      std::vector<std::byte> now(length);
      CUresult result = read(place.address + one.first, variable.original, stream);
      if (result == CUDA_SUCCESS) result = read(content, now, stream);
      put_unchanged(now, variable.original, variable.first);
      if (result == CUDA_SUCCESS) result = write(variable.real, now, stream);
      if (result != CUDA_SUCCESS) return driver_error(result);
    }
    place.variables.push_back(std::move(variable));
  }
  if (!moves.empty() && !device_.copy(moves, std::nullopt)) {
    return Error{.text = "the device could not copy", .number = CUDA_ERROR_UNKNOWN};
  }
  split_up(place);
  place.adopted = false;
  return {};
}

// --- copies that are waited for

CUresult PlacedVariables::read(uint64_t address, std::span<std::byte> to, CUstream stream) {
  const CUresult result = driver_.cuMemcpyDtoHAsync_v2(to.data(), address, to.size(), stream);
  return result == CUDA_SUCCESS ? driver_.cuStreamSynchronize(stream) : result;
}

CUresult PlacedVariables::write(uint64_t address, std::span<const std::byte> from, CUstream stream) {
  const CUresult result = driver_.cuMemcpyHtoDAsync_v2(address, from.data(), from.size(), stream);
  return result == CUDA_SUCCESS ? driver_.cuStreamSynchronize(stream) : result;
}

}  // namespace xmig::server
