/* Kernels of the cpu device that the demo, the tests and the benchmarks launch.
 *
 * Matrices are float32, row-major and dense. Every sum is taken in one fixed order, so results repeat to the bit. */
#include <math.h>
#include <time.h>
#include <xmig/kernel.h>

/* --- elementwise ------------------------------------------------------------------------------------------- */

XMIG_KERNEL(fill, (float *, x), (float, value), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) x[i] = value;
}

XMIG_KERNEL(saxpy, (float, a), (const float *, x), (float *, y), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) y[i] += a * x[i];
}

XMIG_KERNEL(add, (const float *, x), (const float *, y), (float *, out), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) out[i] = x[i] + y[i];
}

XMIG_KERNEL(mul, (const float *, x), (const float *, y), (float *, out), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) out[i] = x[i] * y[i];
}

XMIG_KERNEL(relu, (float *, x), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) x[i] = x[i] > 0 ? x[i] : 0;
}

/* gradient *= (activation > 0) */
XMIG_KERNEL(relu_backward, (const float *, activation), (float *, gradient), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) gradient[i] = activation[i] > 0 ? gradient[i] : 0;
}

/* --- matrices ---------------------------------------------------------------------------------------------- */

enum { LANES = 8 };

static float dot(const float *a, uint64_t stride, const float *b, uint64_t n) {
  float lane[LANES] = {0};
  uint64_t k = 0;
  for (; k + LANES <= n; k += LANES)
    for (int l = 0; l < LANES; ++l) lane[l] += a[(k + l) * stride] * b[k + l];
  float sum = 0;
  for (int l = 0; l < LANES; ++l) sum += lane[l];
  for (; k < n; ++k) sum += a[k * stride] * b[k];
  return sum;
}

/* c[m][n] = a * b (+ c if accumulate); transposed: a is stored as [k][m], b as [n][k]. Each index is a row of c. */
XMIG_KERNEL(gemm, (const float *, a), (const float *, b), (float *, c), (uint32_t, m), (uint32_t, n), (uint32_t, k),
            (uint32_t, transpose_a), (uint32_t, transpose_b), (uint32_t, accumulate)) {
  XMIG_FOR_EACH_INDEX(row, m) {
    const float *from = transpose_a ? a + row : a + row * k;
    const uint64_t stride = transpose_a ? m : 1;
    float *out = c + row * n;
    if (!accumulate)
      for (uint32_t j = 0; j < n; ++j) out[j] = 0;
    if (transpose_b) {
      for (uint32_t j = 0; j < n; ++j) out[j] += dot(from, stride, b + (uint64_t)j * k, k);
    } else {
      for (uint32_t p = 0; p < k; ++p) {
        const float value = from[p * stride];
        const float *line = b + (uint64_t)p * n;
        for (uint32_t j = 0; j < n; ++j) out[j] += value * line[j];
      }
    }
  }
}

XMIG_KERNEL(bias_add, (float *, x), (const float *, bias), (uint32_t, rows), (uint32_t, columns)) {
  XMIG_FOR_EACH_INDEX(row, rows) for (uint32_t j = 0; j < columns; ++j) x[row * columns + j] += bias[j];
}

/* out[column] = sum over the rows; each index is a column */
XMIG_KERNEL(reduce_sum, (const float *, x), (float *, out), (uint32_t, rows), (uint32_t, columns)) {
  XMIG_FOR_EACH_INDEX(column, columns) {
    float sum = 0;
    for (uint32_t row = 0; row < rows; ++row) sum += x[(uint64_t)row * columns + column];
    out[column] = sum;
  }
}

/* --- training ---------------------------------------------------------------------------------------------- */

/* loss[row] = cross entropy of softmax(logits[row]) against labels[row]; gradient of the mean loss over the rows */
XMIG_KERNEL(softmax_cross_entropy, (const float *, logits), (const int32_t *, labels), (float *, loss),
            (float *, gradient), (uint32_t, rows), (uint32_t, classes)) {
  XMIG_FOR_EACH_INDEX(row, rows) {
    const float *x = logits + row * classes;
    float *g = gradient + row * classes;
    const int32_t label = labels[row];
    XMIG_ASSERT(label >= 0 && (uint32_t)label < classes);
    float top = x[0], sum = 0;
    for (uint32_t j = 1; j < classes; ++j) top = x[j] > top ? x[j] : top;
    for (uint32_t j = 0; j < classes; ++j) sum += g[j] = expf(x[j] - top);
    for (uint32_t j = 0; j < classes; ++j) g[j] = (g[j] / sum - ((uint32_t)label == j)) / (float)rows;
    loss[row] = logf(sum) + top - x[label];
  }
}

/* One AdamW step (Loshchilov and Hutter, 2019); step counts from 1. */
XMIG_KERNEL(adamw, (float *, w), (const float *, g), (float *, m), (float *, v), (uint64_t, n), (float, rate),
            (float, beta1), (float, beta2), (float, epsilon), (float, decay), (uint32_t, step)) {
  const float unbias1 = 1 - powf(beta1, (float)step), unbias2 = 1 - powf(beta2, (float)step);
  XMIG_FOR_EACH_INDEX(i, n) {
    m[i] = beta1 * m[i] + (1 - beta1) * g[i];
    v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    w[i] -= rate * (m[i] / unbias1 / (sqrtf(v[i] / unbias2) + epsilon) + decay * w[i]);
  }
}

XMIG_KERNEL(sgd, (float *, w), (const float *, g), (uint64_t, n), (float, rate)) {
  XMIG_FOR_EACH_INDEX(i, n) w[i] -= rate * g[i];
}

/* *correct += rows whose largest logit is the label's; launch with one block */
XMIG_KERNEL(count_correct, (const float *, logits), (const int32_t *, labels), (uint32_t *, correct), (uint32_t, rows),
            (uint32_t, classes)) {
  XMIG_FOR_EACH_INDEX(row, rows) {
    const float *x = logits + row * classes;
    int32_t best = 0;
    for (uint32_t j = 1; j < classes; ++j)
      if (x[j] > x[best]) best = (int32_t)j;
    *correct += best == labels[row];
  }
}

/* --- for tests and benchmarks ------------------------------------------------------------------------------- */

XMIG_KERNEL(empty, (uint64_t, a), (uint64_t, b), (uint64_t, c), (uint64_t, d), (uint32_t, e), (uint32_t, f), (float, g),
            (float, h)) {}

/* Tells whether it ran once or twice. */
XMIG_KERNEL(increment, (uint64_t *, counter)) { ++*counter; }

/* Keeps its block busy for a time. */
XMIG_KERNEL(spin, (uint64_t, nanoseconds)) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000ll + now.tv_nsec + (int64_t)nanoseconds;
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while (now.tv_sec * 1000000000ll + now.tv_nsec < end);
}

/* Writes where it is instructed to, mapped or not. */
XMIG_KERNEL(touch, (volatile uint8_t *, address)) { *address = 1; }

XMIG_KERNEL(assert_fail, (int32_t, value)) { XMIG_ASSERT(value == 42); }

XMIG_KERNEL(trap, (int32_t, unused)) { XMIG_TRAP(); }

XMIG_KERNEL(misaligned, (uint64_t *, address)) {
  XMIG_REQUIRE_ALIGNED(address, 8);
  *address = 1;
}

XMIG_KERNEL(divide, (volatile int32_t *, values)) { values[0] = values[1] / values[2]; }
