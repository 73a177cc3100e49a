#include "server/records/stored_records.h"

#include <cstring>

namespace xmig::server {
namespace {

uint64_t length_at(const std::byte* at) {
  uint64_t length;
  std::memcpy(&length, at, sizeof(length));
  return length;
}

}  // namespace

std::span<const std::byte> RecordList::Iterator::operator*() const { return {at_ + sizeof(uint64_t), length_at(at_)}; }

RecordList::Iterator& RecordList::Iterator::operator++() {
  at_ += sizeof(uint64_t) + length_at(at_);
  return *this;
}

void RecordList::add(std::span<const std::byte> record) {
  const uint64_t length = record.size();
  const auto head = std::as_bytes(std::span(&length, 1));
  bytes_.insert(bytes_.end(), head.begin(), head.end());
  bytes_.insert(bytes_.end(), record.begin(), record.end());
  ++count_;
}

std::optional<RecordList> RecordList::take(uint64_t count, std::span<const std::byte>& bytes) {
  auto rest = bytes;
  for (uint64_t i = 0; i < count; ++i) {
    if (rest.size() < sizeof(uint64_t)) return std::nullopt;
    const uint64_t length = length_at(rest.data());
    rest = rest.subspan(sizeof(length));
    if (length > rest.size()) return std::nullopt;
    rest = rest.subspan(length);
  }
  RecordList list;
  list.count_ = count;
  list.bytes_.assign(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(rest.size()));
  bytes = rest;
  return list;
}

const RecordList& StoredRecords::list() {
  if (!list_) {
    list_.emplace();
    for (const auto& [sequence, record] : records_) list_->add(record);
  }
  return *list_;
}

}  // namespace xmig::server
