// The records that made the program's objects, or set something on them: a snapshot writes them down, and a recovery dispatches
// them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace xmig::server {

// Records in the order in which they happened, one after the other as they are in a snapshot's file.
class RecordList {
 public:
  class Iterator {
   public:
    explicit Iterator(const std::byte* at) : at_(at) {}
    std::span<const std::byte> operator*() const;
    Iterator& operator++();
    bool operator==(const Iterator&) const = default;

   private:
    const std::byte* at_;
  };

  void add(std::span<const std::byte> record);
  // The first `count` records of `bytes`, which then begin behind them; nothing if it has not as many.
  static std::optional<RecordList> take(uint64_t count, std::span<const std::byte>& bytes);

  uint64_t size() const { return count_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  Iterator begin() const { return Iterator(bytes_.data()); }
  Iterator end() const { return Iterator(bytes_.data() + bytes_.size()); }

 private:
  uint64_t count_ = 0;
  std::vector<std::byte> bytes_;  // of each record its length, and itself
};

class StoredRecords {
  using Map = std::multimap<uint64_t, std::vector<std::byte>>;  // by sequence

 public:
  // A record that is among them for as long as this is there.
  class Kept {
   public:
    Kept() = default;
    Kept(Kept&& other) noexcept : all_(std::exchange(other.all_, nullptr)), at_(other.at_) {}
    Kept& operator=(Kept&& other) noexcept {
      std::swap(all_, other.all_);
      std::swap(at_, other.at_);
      return *this;
    }
    ~Kept() {
      if (all_) all_->erase(at_);
    }

   private:
    friend class StoredRecords;
    Kept(StoredRecords* all, Map::iterator at) : all_(all), at_(at) {}
    StoredRecords* all_ = nullptr;
    Map::iterator at_;
  };

  StoredRecords() = default;
  StoredRecords(const StoredRecords&) = delete;

  [[nodiscard]] Kept keep(uint64_t sequence, std::vector<std::byte> record) {
    list_.reset();
    return Kept(this, records_.emplace(sequence, std::move(record)));
  }
  // All of them. Snapshots ask for it while the device stands still, and mostly nothing has changed since the one before.
  const RecordList& list();

 private:
  void erase(Map::iterator at) {
    list_.reset();
    records_.erase(at);
  }

  Map records_;
  std::optional<RecordList> list_;
};

}  // namespace xmig::server
