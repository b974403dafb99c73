/* The platforms that forebay runs on. All others are refused here, in one line, when it is compiled. */
#ifndef FOREBAY_PLATFORM_H
#define FOREBAY_PLATFORM_H

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__)) || !defined(__LP64__)
#error "forebay supports 64-bit Linux on x86-64 and aarch64 only"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "forebay supports little-endian machines only"
#endif
#if !defined(__GNUC__)
#error "forebay needs GCC or Clang"
#endif

#endif
