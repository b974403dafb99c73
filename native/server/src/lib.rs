//! The decision server of forebay: programs that aren't Python ask the limits that a host's Python processes have.
//!
//! Python reads the rules and makes the limiters (`plan` is what it hands over). From then on no request needs Python:
//! `server` accepts connections, `http` and `api` read requests, `decide` matches the rules and asks forebay's C API
//! (`capi`). Nothing of the algorithms is here.
//!
//! Where the limits aren't in the host's memory, Python charges them: `gate` asks it, and `gated` answers.

#![deny(unsafe_code)]
#![warn(clippy::all)]
#![cfg_attr(all(test, fuzzing), no_main)]

#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod access;
mod answers;
mod api;
mod bodies;
mod capi;
mod carrying;
mod charges;
mod charging;
mod charging_by_gate;
mod client;
mod decide;
mod entries;
#[cfg(test)]
mod fuzz;
mod gate;
mod gated;
mod grpc;
mod holding;
mod http;
mod ids;
mod keys;
mod leases;
mod live;
mod metrics;
#[cfg(test)]
mod mutations;
mod objects;
mod plan;
mod python;
mod question;
mod readings;
mod refunds;
mod report;
mod request;
mod retries;
mod server;
mod tls;
