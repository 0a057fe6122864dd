//! `rdma-mesh`: which links of a cluster are slow, and which do not work.
//!
//! A process learns its rank from the engine that started it ([`launcher`]), finds rank 0 ([`follower`]), connects to all
//! others ([`storm`]), and measures when rank 0 tells it to ([`member`], [`task`], [`load`]). Rank 0 leads ([`leader`],
//! [`coordinator`], [`tournament`]), gathers ([`results`]), judges ([`odd`]) and reports ([`report`], [`figures`],
//! [`prometheus`], [`heatmap`], [`page`]).

pub mod cli;
pub mod control;
pub mod coordinator;
pub mod figures;
pub mod follower;
pub mod frame;
pub mod heatmap;
pub mod hello;
pub mod launcher;
pub mod leader;
pub mod link;
pub mod load;
pub mod member;
pub mod memory;
pub mod odd;
pub mod outbox;
pub mod page;
pub mod prometheus;
pub mod rank;
pub mod report;
pub mod results;
pub mod role;
pub mod run;
#[cfg(test)]
mod sample;
pub mod slurm;
pub mod storm;
pub mod task;
pub mod tournament;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::program;

/// The program reads the command line, takes its part in the run, and reports failures in one line.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    program::main(args, run::run)
}
