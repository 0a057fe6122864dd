//! Compares the cost of the same work on bare TCP, on this library, and in programs of other projects, in one run.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::bench::main(std::env::args_os())
}
