mod chaos;
mod fences;
mod flow;
mod requests;
mod script;
mod violations;
