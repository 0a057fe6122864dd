//! Reports which RDMA devices and providers this machine can use, and what is missing: `rdma-doctor [ADDRESS...]`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::doctor::main(std::env::args_os())
}
