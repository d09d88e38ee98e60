// Steps arrays in their own memory: a kernel of Inductor for the whole rows of each, and for what is left over
// in a row of ours. TYPES and VALUES are the parameters of the kernel, all 64 bits wide, as x86-64 and AArch64
// pass them: addresses, and numbers of rows.
#include <cstdint>
#include <cstring>
#include <vector>

using std::int64_t;
enum What : int64_t { ARRAY, NUMBERS, FIRST, KEYS, COLUMN, ROWS };

extern "C" void step_arrays(
    void (*kernel)(TYPES),
    int64_t parameters,        // of the kernel
    const int64_t* what,       // each is
    const int64_t* which,      // the kind of array
    int64_t numbers,           // of the rules: their address
    int64_t column,            // 0, 1, ... up to the width: its address
    const int64_t* pieces,     // of each: its row of addresses, its place, its first element, its length
    int64_t count,             // of pieces
    const int64_t* addresses,  // of arrays, one for each kind
    int64_t kinds,
    const int64_t* itemsize,   // of each kind
    const int64_t* written,    // whether the kernel writes to arrays of a kind
    const int32_t* keys,       // of every column a row, with an entry for every place
    int64_t columns,
    int64_t places,
    int64_t width,             // elements of a row
    int64_t longest,           // rows of a piece
    int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<int32_t> firsts(longest), words(columns * longest);
    std::vector<char> row(kinds * width * sizeof(double));
    std::vector<int64_t> x(parameters);

    auto run = [&](int64_t place, int64_t first, int64_t rows, auto address) {
      for (int64_t r = 0; r < rows; ++r) firsts[r] = static_cast<int32_t>(first + r * width);
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t r = 0; r < rows; ++r) words[c * rows + r] = keys[c * places + place];
      for (int64_t i = 0; i < parameters; ++i)
        x[i] = what[i] == ARRAY     ? address(which[i])
               : what[i] == NUMBERS ? numbers
               : what[i] == FIRST   ? reinterpret_cast<int64_t>(firsts.data())
               : what[i] == KEYS    ? reinterpret_cast<int64_t>(words.data())
               : what[i] == COLUMN  ? column
                                    : rows;
      kernel(VALUES);
    };

#pragma omp for schedule(dynamic)
    for (int64_t k = 0; k < count; ++k) {
      const int64_t *piece = pieces + 4 * k, *of_piece = addresses + piece[0] * kinds;
      const int64_t place = piece[1], first = piece[2], length = piece[3];
      const int64_t rows = length / width, left = length % width;
      auto whole = [&](int64_t kind) { return of_piece[kind] + first * itemsize[kind]; };
      if (rows) run(place, first, rows, whole);
      if (!left) continue;
      auto mine = [&](int64_t kind) {
        return reinterpret_cast<int64_t>(row.data()) + kind * width * int64_t(sizeof(double));
      };
      auto theirs = [&](int64_t kind) {
        return reinterpret_cast<char*>(whole(kind) + rows * width * itemsize[kind]);
      };
      for (int64_t kind = 0; kind < kinds; ++kind)
        std::memcpy(reinterpret_cast<char*>(mine(kind)), theirs(kind), left * itemsize[kind]);
      run(place, first + rows * width, 1, mine);
      for (int64_t kind = 0; kind < kinds; ++kind)
        if (written[kind]) std::memcpy(theirs(kind), reinterpret_cast<char*>(mine(kind)), left * itemsize[kind]);
    }
  }
}
